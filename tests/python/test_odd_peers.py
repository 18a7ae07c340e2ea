"""A worker whose tensors this torch cannot hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import LIMIT, together

import fserver

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ARCHIVE = Path(os.environ.get("FSERVER_ARCHIVE") or ROOT / "build/libfserver.a").resolve()

FLOAT32, QINT8, UNKNOWN = "6", "12", "99"


@pytest.fixture(scope="module")
def odd_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert ARCHIVE.is_file(), "the archive has not been built: make engine"
    path = tmp_path_factory.mktemp("odd") / "odd_worker"
    include = f"-I{ROOT / 'engine/cabi'}"
    source = str(HERE / "odd_worker.c")
    subprocess.run(
        ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", include, source, str(ARCHIVE)]
        + ["-Wl,-z,lazy", "-Wl,--unresolved-symbols=ignore-in-object-files"]  # see fserver.h
        + ["-Wl,--export-dynamic", "-lresolv", "-pthread", "-o", str(path)],
        check=True,
        timeout=120,
    )
    return path


@pytest.mark.parametrize("memory", ["own", "shared"])
@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ([UNKNOWN, "16", "4"], "has dtype 99, which the server cannot hold"),
        ([QINT8, "16", "16"], "has dtype 12, which the server cannot hold"),
        ([FLOAT32, "16", "3"], "has 16 bytes, which is not what dtype 6 and shape [3] make"),
        ([FLOAT32, "0", "3"], "has 0 bytes, which is not"),
        ([FLOAT32, "4", "0"], "has 4 bytes, which is not"),
        ([FLOAT32, "16", str(2**40), str(2**40)], "shape [1099511627776 1099511627776] make"),
        ([FLOAT32, "16", str(2**62)], f"shape [{2**62}] make"),
    ],
)
def test_odd_tensor(odd_worker: Path, memory: str, tensor: list[str], text: str) -> None:
    """It is refused to the worker that has sent it. The batches of the others are as ever."""
    shape: dict[str, Any] = {"workers": 2, "connect": False, "settings": {"FSERVER_LOG": "error"}}
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, **shape)
    worker = fserver.Worker(scheduler=server.scheduler, node_rank=1, **shape)
    port = server.scheduler.rpartition(":")[2]
    odd = subprocess.Popen([odd_worker, port, memory, *tensor], stdout=subprocess.PIPE, text=True)
    try:
        together([server.connect, worker.connect])
        for turn in range(2):
            h = worker.push_pull([torch.full((4,), float(turn))], [1], [], [])
            batch = server.get_batch(LIMIT * 1e3)
            assert [keys for _, _, keys in batch] == [[2], [1]]
            assert [tensors[0].tolist() for _, tensors, _ in batch] == [[0] * 4, [turn] * 4]
            for handler, _, _ in batch:
                server.respond([], handler)
            del batch
            worker.wait(h, LIMIT * 1e3)
        said, _ = odd.communicate(timeout=LIMIT)
        assert odd.returncode == 0
        refusal = "server 0 cannot take the push_pull: push tensor 0, of key 1, has "
        first, second = said.splitlines()
        assert first == second and refusal in first and text in first
    finally:
        odd.kill()
        odd.wait()
        worker.close()
        server.close()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [x for x in maps if "fserver-shared" in x and " r--s " in x]
