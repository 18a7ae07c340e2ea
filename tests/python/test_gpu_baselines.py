"""What the timings of others' ways between GPUs are made of, without a GPU: what is left of an
error, and the table of ours beside them."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def baselines() -> ModuleType:
    path = sys.path[:]
    try:
        return load("gpu_baselines")
    finally:
        sys.path[:] = path


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load("gpu_table")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "AssertionError()"),
        ("plain", "plain"),
        ("side 0:\nTraceback:\n  raise x\nValueError: wrong data: 3 of 8 bytes\n",
         "ValueError: wrong data: 3 of 8 bytes"),
        ("side 0:\nTimeoutError: the other side does not answer\n\nside 1:\n  File\n"
         "torch.AcceleratorError: CUDA error: no\nCUDA kernel errors might be late\n",
         "torch.AcceleratorError: CUDA error: no"),
        ("side 1: EOFError()",
         "side 1: EOFError(): it crashed, or hung and was ended; standard error says where"),
    ],
)  # fmt: skip
def test_reason(baselines: ModuleType, text: str, want: str) -> None:
    assert baselines.reason(AssertionError(text) if text else AssertionError()) == want


def times(p50: float, p99: float) -> dict[str, float]:
    return {"p50_us": p50, "p99_us": p99}


CHANNEL = {
    "rows": [
        {"work": "channel sm, graph x20", "push": 4, "pull": 4, "table": {}, **times(5, 6)},
        {"work": "channel sm, graph x20", "push": 4, "pull": 4, "table": {"B": 1}, **times(9, 9)},
        {"work": "channel sm, CPU time of a call", **times(1, 1)},
        {"work": "channel ce, one way", "size": 64, **times(200, 210)},
        {"work": "channel ce, both ways", "size": 64, **times(220, 230)},
        {"work": "raw copy engine, graph x20", "push": 4, "pull": 4, **times(20, 21)},
        {"work": "raw copy engine one way, enqueued x20", "push": 64, "pull": 0, **times(190, 191)},
    ]
}
EAGER = {
    "rows": [
        {"out": 4, "back": 4, "gpu": times(15, 20), "gpu-caller": times(14, 19),
         "cpu": times(1, 1), "floor": times(12, 16)}
    ]
}  # fmt: skip


def row(baseline: str, mode: str, push: int, pull: int, **what: Any) -> dict[str, Any]:
    return {"baseline": baseline, "mode": mode, "push": push, "pull": pull, **what}


def test_measured(table: ModuleType) -> None:
    rows = table.measured(CHANNEL, EAGER)
    assert [(r["who"], r["mode"], r["push"], r["pull"], r["p50_us"]) for r in rows] == [
        ("channel sm", "graph", 4, 4, 5),
        ("channel ce", "enqueued", 64, 8, 200),
        ("channel ce", "both ways", 64, 64, 220),
        ("raw copy engine", "graph", 4, 4, 20),
        ("raw copy engine", "enqueued", 64, 8, 190),
        ("push_pull gpu", "sync each", 4, 4, 15),
        ("push_pull gpu-caller", "sync each", 4, 4, 14),
        ("raw C", "sync each", 4, 4, 12),
    ]
    assert table.measured({}, {}) == []


def test_compare_takes_the_same_work_of_all_rounds(table: ModuleType) -> None:
    mine = table.measured(CHANNEL, {})[:3]
    theirs = [
        row("nccl", "graph", 4, 4, **times(30, 40)),
        row("nccl", "graph", 4, 4, **times(20, 20)),
        row("nccl", "enqueued", 4, 4, **times(1, 1)),
        row("nccl", "graph", 8, 8, **times(1, 1)),
        row("symm", "graph", 4, 4, skipped="no"),
        row("wire", "wire", 4, 4, p50_us=0.5),
        row("wire", "wire", 64, 64, p50_us=320),
        row("wire", "both ways", 64, 64, p50_us=200),
    ]
    rows = table.compare(mine, theirs)
    assert [r["mode"] for r in rows] == ["both ways", "enqueued", "graph"]
    nccl = row("nccl", "graph", 4, 4, **times(25, 30), ratio=0.2, p99_ratio=0.2, rounds=[30, 20])
    wire = row("wire", "wire", 4, 4, p50_us=0.5, ratio=10, rounds=[0.5])
    assert rows[2]["against"] == [
        {key: value for key, value in one.items() if key not in ("mode", "push", "pull")}
        for one in (nccl, wire)
    ]
    assert [one["ratio"] for one in rows[0]["against"]] == [1.1]
    assert rows[1]["against"] == []


def test_table_of_a_folder(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", str(tmp_path)])
    assert table.main() == 1
    assert "channel.json" in capsys.readouterr().err
    found = [row("nccl", "graph", 4, 4, **times(10, 12)), row("nixl", "all", 0, 0, skipped="none")]
    (tmp_path / "baselines-1.json").write_text(json.dumps({"rows": found}))
    (tmp_path / "channel.json").write_text(json.dumps(CHANNEL))
    (tmp_path / "eager.json").write_text(json.dumps(EAGER))
    assert table.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("channel sm" in one and one.endswith("raw copy engine 20.00 x0.25") for one in lines)
    assert lines[-1] == "skipped nixl, all: none"
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 5
