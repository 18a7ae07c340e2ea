"""Starts a program in processes as torchrun does: forks of one that has imported torch."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import TCPStore

from fserver.bench.errors import BenchError
from fserver.bench.processes import Child, gather

LIMIT = 120.0
"""Seconds after which the program hangs."""


def launched(program: Path, *options: str, size: int = 2) -> str:
    """Runs it in `size` processes and gives what they print. They have to end well."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store, as torchrun has
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.NamedTemporaryFile("r") as out:
        ranks, failed = [], ""
        for rank in range(size):
            env = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(Child(f"rank {rank}", _run, str(program), options, env, out.name))
        try:
            gather(ranks, LIMIT, 5)
        except BenchError as error:
            failed = str(error)
        for child in ranks:
            child.close(0 if failed else LIMIT)
        text = out.read()
    assert not failed and not any(child.process.exitcode for child in ranks), f"{failed}\n{text}"
    return text


def _run(
    conn: Connection, program: str, options: tuple[str, ...], env: dict[str, str], out: str
) -> None:
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(file, fd)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [program, *options]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
    conn.send(None)
