"""The program that times ringx beside others."""

import json
from pathlib import Path

import pytest
from launch import launched

BENCH = Path(__file__).resolve().parents[2] / "tools" / "ringx_bench.py"


@pytest.mark.parametrize(
    ("mask", "ways"), [("causal", ["alone", "X3", "ring"]), ("full", ["alone", "X3b", "ulysses"])]
)
def test_times_and_table(mask: str, ways: list[str], tmp_path: Path):
    file = tmp_path / "rows.json"
    options = ["--mask", mask, "--tokens", "256", "--ways", ",".join(ways)]
    said = launched(BENCH, *options, "--iterations", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {row["way"] for row in rows} == set(ways)
    for row in rows:
        assert "skipped" not in row and f"\n{row['way']} " in said, row
        for name in ("forward", "both"):
            assert row[f"{name}_ms"] > 0
            assert (row[f"{name}_of_ideal"] == 1) or row["way"] != "alone"
