"""`fserver bench cpp`, with two processes in C++."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fserver import bench
from fserver.bench import cpp
from fserver.bench.errors import BenchError

pytestmark = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("cc") is None, reason="needs compilers"
)


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_rows(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    argv = ["cpp", "--transport", transport, "--sizes", "64,4K", "--rounds", "2", "--iters", "10"]
    assert bench.main([*argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["transport"], row["bytes_out"]) for row in rows] == [
        (f"{transport} {language}", size) for size in (64, 4096) for language in ("C++", "Python")
    ]
    for row in rows:
        assert row["rounds"] == 2 and row["p50_us"] > 0 and row["baseline_p50_us"] > 0


def test_a_program_that_fails(tmp_path: Path) -> None:
    program = cpp.compiled(tmp_path)
    with cpp.Program(program, "pigeon", None) as failing:
        failing.prepare(64, 64)
        with pytest.raises(BenchError, match='FSERVER_TRANSPORT="pigeon"'):
            failing.measure(1, 1)
    with cpp.Program(program, "tcp", None) as right:
        right.prepare(64, 32)  # not an echo
        assert right.measure(1, 5)["iters"] == 5


def test_no_compiler(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BenchError, match="no-such-compiler: not found"):
        cpp.compiled(tmp_path)
