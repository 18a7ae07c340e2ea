"""Starts a program in processes as torchrun does: forks of one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

LIMIT = 120.0
"""Seconds after which the program hangs."""


def launched(program: Path, *options: str, size: int = 2) -> str:
    """Runs it in `size` processes and gives what they print. They have to end well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fserver"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store, as torchrun has
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.NamedTemporaryFile("r") as out:
        started = []
        for rank in range(size):
            env = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (str(program), options, env, out.name)
            started.append(context.Process(target=_run, args=args, daemon=True))
            started[-1].start()
        end = time.monotonic() + LIMIT
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        text = out.read()
    assert [process.exitcode for process in started] == [0] * size, text
    return text


def _run(program: str, options: tuple[str, ...], env: dict[str, str], out: str) -> None:
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(file, fd)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [program, *options]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
