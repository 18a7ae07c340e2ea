"""A worker whose tensors this torch cannot hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from nodes import LIMIT

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
        ([UNKNOWN, "16", "4"], "dtype 99"),
        ([QINT8, "16", "16"], "dtype 12"),
        ([FLOAT32, "16", "3"], "size in bytes 16"),
        ([FLOAT32, "0", "3"], "size in bytes 0"),
        ([FLOAT32, "4", "0"], "size in bytes 4"),
        ([FLOAT32, "16", str(2**40), str(2**40)], f"dimension {2**40}"),
        ([FLOAT32, "16", str(2**62)], f"dimension {2**62}"),
    ],
)
def test_odd_tensor(odd_worker: Path, memory: str, tensor: list[str], text: str) -> None:
    server = fserver.Server(
        scheduler="127.0.0.1:0",
        host_scheduler=True,
        connect=False,
        settings={"FSERVER_LOG": "error"},
    )
    port = server.scheduler.rpartition(":")[2]
    worker = subprocess.Popen([odd_worker, port, memory, *tensor])
    try:
        server.connect()
        with pytest.raises(fserver.Error, match=f"worker 0 sent a tensor with key 1, {text}, "):
            server.get_batch(LIMIT * 1e3)
        [(handler, [good], keys)] = server.get_batch(LIMIT * 1e3)
        assert (keys, good.tolist()) == ([2], [0] * 4)
        server.respond([], handler)
        assert worker.wait(LIMIT) == 0
    finally:
        worker.kill()
        worker.wait()
        server.close()
    del good
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [x for x in maps if "fserver-shared" in x and " r--s " in x]
