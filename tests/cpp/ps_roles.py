"""Runs a program as a scheduler, a server and two workers, as scripts of ps-lite do.

python ps_roles.py PROGRAM
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys


def free_port() -> int:
    """A port that no process gets that asks for any, as a server may before the scheduler does."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("100 ports from 20000 to 32000 are in use")


def main(program: str) -> int:
    port = free_port()
    env = {**os.environ, "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    env |= {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port)}
    roles = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    started = [
        subprocess.Popen(
            [program],
            env={**env, "DMLC_ROLE": role, "DMLC_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for role, rank in roles
    ]
    status = 0
    for (role, _), process in zip(roles, started, strict=True):
        out, _ = process.communicate(timeout=60)
        status |= process.returncode or out != f"{role} is done\n"
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
