"""DMLC_ROLE=joint: a process that becomes the launcher of its host."""

import os
import sys
from typing import NoReturn

from fserver.command import command
from fserver.env import settings
from fserver.errors import ConfigError
from fserver.settings import inherited


def become_launcher() -> NoReturn:
    """Replaces this process by ``fserver run`` with the process's own command line.

    Raises:
        ConfigError: a setting is wrong.
    """
    found = settings(inherited())
    if found["errors"]:
        raise ConfigError("\n".join(found["errors"]))
    count = {s["name"]: s["value"] for s in found["settings"]}
    words = command("run", "--workers", count["DMLC_NUM_WORKER"])
    words += ["--servers", count["DMLC_NUM_SERVER"]]
    words += ["--group-size", count["DMLC_GROUP_SIZE"]]
    words += ["--", sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, words)
