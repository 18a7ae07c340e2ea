"""Random kills. `make chaos N=1000` makes more."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHAOS = Path(__file__).parents[1] / "chaos" / "chaos.py"


def test_kills(tmp_path: Path) -> None:
    """In clusters of all shapes and both modes, in every way; every role is killed. The limits of
    time leave room for a host whose cores stall for seconds; those of `make chaos` do not."""
    results = tmp_path / "chaos.json"
    argv = [sys.executable, str(CHAOS), "--kills", "9", "--seed", "17", "--json", str(results)]
    argv += ["--known", "15", "--rejoined", "30", "--heartbeat", "8"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    print(done.stdout, done.stderr)
    found = json.loads(results.read_text())
    assert (found["kills"], found["hangs"], found["ended"], found["wrong"]) == (9, [], [], 0)
    assert found["exchanges"] > 0
    turns = found["turns"]
    assert {turn["mode"] for turn in turns} == {"raise", "wait"}
    assert {turn["shape"] for turn in turns} == {"fan-in", "rails", "fan-out", "mesh"}
    assert {turn["way"] for turn in turns} == {"kill", "term", "close", "freeze", "both"}
    killed = {victim.split()[0] for turn in turns for victim in turn["victims"]}
    assert killed == {"scheduler", "worker", "server"}
    assert done.returncode == 0


def test_wrong_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another exchange, run, rank or server, and a single flipped bit."""
    monkeypatch.syspath_prepend(str(CHAOS.parent))
    member = importlib.import_module("member")
    pattern, answer_to, head = member.pattern, member.answer_to, member.HEAD
    x = pattern(4096, 1, 2, 3)
    assert torch.equal(x, pattern(4096, 1, 2, 3))
    y = answer_to(x, 0, 7)
    for other in (pattern(4096, 0, 2, 3), pattern(4096, 1, 3, 3), pattern(4096, 1, 2, 4)):
        assert not torch.equal(x, other) and not torch.equal(x[head:], other[head:])
        assert not torch.equal(y, answer_to(other, 0, 7))
    assert not torch.equal(y[head:], answer_to(x, 1, 7)[head:])
    y[-1] ^= 1
    assert not torch.equal(y, answer_to(x, 0, 7))
