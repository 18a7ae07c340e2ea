"""The benchmark's own program: what it compares ringx with has to be right too."""

import json
from pathlib import Path
from typing import Any

from launch import launched

from fserver.ringx.algorithms import ALGORITHMS

BENCH = Path(__file__).resolve().parents[2] / "tools" / "ringx_bench.py"


def rows_of(tmp_path: Path, command: str, *options: str) -> list[dict[str, Any]]:
    """What it leaves, run by two processes."""
    file = tmp_path / "rows.json"
    launched(BENCH, command, *options, "--json", str(file))
    return json.loads(file.read_text())["rows"]


def test_every_way_is_right(tmp_path: Path):
    ways = ["alone", "X3", "X3b", "ring p2p", "ulysses"]
    options = ["--mask", "both", "--tokens", "256", "--ways", ",".join(ways)]
    rows = rows_of(tmp_path, "time", *options, "--iterations", "1", "--warmup", "0")
    assert {row["way"] for row in rows} == set(ways)
    for row in rows:
        assert row["errors"].keys() == {"out", "dq"} and max(row["errors"].values()) < 2e-6, row


def test_check_passes(tmp_path: Path):
    """All algorithms, also right behind each other with other numbers."""
    rows = rows_of(tmp_path, "check")
    assert all(row["pass"] for row in rows)
    assert {row["way"] for row in rows} > {*ALGORITHMS}
    assert all(row["in_a_row"] < 1e-6 for row in rows if row["way"] in ALGORITHMS)
