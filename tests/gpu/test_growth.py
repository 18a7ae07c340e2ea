"""What processes and GPUs have in use does not grow with exchanges through channels. EXCHANGES says
how many there are of each mode (default 50000), within 40 seconds."""

from __future__ import annotations

import os

import pytest
from on_graphs import LIMITS, CheckedSide, by_the_byte, memory

from fserver.bench import graph


@pytest.mark.parametrize("mode", graph.MODES)
def test_memory(gpus: int, mode: str) -> None:
    if gpus < 2:
        pytest.skip(f"needs two GPUs, this machine has {gpus}")
    exchanges, seconds = int(os.environ.get("EXCHANGES", 50_000)), 40.0
    shape = (2, 2) if gpus >= 4 else (1, 1)
    what = {
        "mode": mode,
        "shape": (61, 3, 128, 7168),
        "exchanges": exchanges,
        "seconds": seconds,
    }
    with graph.team(shape, actor=CheckedSide, variables=by_the_byte()) as team:
        found = graph.play(team, memory, what, 2 * seconds + 30)
    for side in found:
        print(f"{side['exchanges']} exchanges by {mode}: {side['growth']}")
        assert side["wrong"] == 0
        assert {k: v for k, v in side["growth"].items() if v > LIMITS.get(k, 0)} == {}
