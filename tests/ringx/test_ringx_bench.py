"""The benchmark's own program: what it compares ringx with has to be right too."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "tools" / "ringx_bench.py"


def test_every_way_is_right(tmp_path: Path):
    file = tmp_path / "time.json"
    ways = ["alone", "X3", "X3b", "ring p2p", "ulysses"]
    run = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    run += [str(BENCH), "time", "--mask", "both", "--tokens", "256", "--ways", ",".join(ways)]
    run += ["--iterations", "1", "--warmup", "0", "--json", str(file)]
    done = subprocess.run([sys.executable, *run], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["way"] for row in rows} == set(ways)
    for row in rows:
        assert row["errors"].keys() == {"out", "dq"} and max(row["errors"].values()) < 2e-6, row
