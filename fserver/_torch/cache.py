"""Compiles an adapter for a torch for which the package has none, into the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from fserver._torch import build

HEADER = build.HERE.parent / "include/fserver.h"


class CompileError(Exception):
    """There is no adapter for this torch, and it cannot be compiled. The text gives the reason and
    the remedy in one line."""


def path(version: str) -> Path | None:
    """Returns the path of a compiled adapter for exactly this torch, this Python and this fserver.
    It is in $XDG_CACHE_HOME/fserver, by default ~/.cache/fserver. It need not exist. None: there is
    neither, as for a user without a home. A folder of the current one is never taken, because what
    is there is loaded."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        return None
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return Path(cache) / "fserver" / build.identity(HEADER) / f"{version}{suffix}"


def compiled(version: str, torch: Path, again: bool = False) -> Path:
    """Compiles the adapter unless it exists. Of several processes, only one compiles it.

    Args:
        version: the version of torch.
        torch: the folder of the package torch.
        again: compile the adapter even if it exists.

    Returns:
        The path of the adapter.

    Raises:
        CompileError: the adapter cannot be compiled.
    """
    try:
        made = path(version)
        if made is None:
            raise CompileError(
                "an adapter cannot be compiled: this user has no home (set XDG_CACHE_HOME to a "
                "folder that can be written)"
            )
        if made.is_file() and not again:
            return made
        command = _command(torch)
        made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(made.parent):
            if again or not made.is_file():
                _compile(made, version, torch, command)
    except OSError as error:
        raise CompileError(
            f"an adapter cannot be compiled: {error} (set XDG_CACHE_HOME to a folder that can be "
            "written)"
        ) from error
    return made


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _command(torch: Path) -> list[str]:
    """Returns the compiler and its flags, after checking that all it needs is there."""
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(cxx[0]) is None:
        raise CompileError(
            f"an adapter cannot be compiled, because there is no C++ compiler {cxx[0]} (run "
            "apt-get install g++, or set CXX)"
        )
    python = Path(sysconfig.get_path("include"))
    for header, remedy in (
        (python / "Python.h", "run apt-get install python3-dev"),
        (torch / "include/c10/core/TensorImpl.h", "install a torch with its headers"),
        (HEADER, "install fserver again"),
    ):
        if not header.is_file():
            raise CompileError(
                f"an adapter cannot be compiled, because {header} is missing ({remedy})"
            )
    return [*cxx, *build.compile_flags(HEADER), *build.includes(torch, python)]


def _compile(made: Path, version: str, torch: Path, command: list[str]) -> None:
    print(
        f"fserver: compiling an adapter for torch {version} (only once)",
        file=sys.stderr,
        flush=True,
    )
    new, log = made.with_name(f".{made.name}.new"), made.with_suffix(".log")
    link = build.link_flags(torch)
    done = subprocess.run(
        [*command, str(build.SOURCE), "-o", str(new), *link],
        capture_output=True,
        text=True,
        errors="replace",
    )
    log.write_text(shlex.join(done.args) + "\n" + done.stdout + done.stderr)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        first = next((line for line in lines if "error" in line), "no message")
        raise CompileError(f"the adapter does not compile: {first.strip()} (see {log})")
    new.replace(made)
