"""tests/long/soak.py sees what grows. `make soak` runs it for long."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from bench_fakes import hoarding_server, leaking_server, opening_server, worker

from fserver.bench import crew

LONG = Path(__file__).parents[1] / "long"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(LONG))
    return importlib.import_module("soak")


@pytest.fixture
def few_looks(soak, monkeypatch):
    """A look at memory takes collections of all that torch has imported."""
    monkeypatch.setattr(soak, "CHECKS", 1)
    monkeypatch.setattr(soak, "PARTS", 2)


def played_by(monkeypatch, server):
    for role, make in (("worker", worker), ("server", server)):
        monkeypatch.setitem(crew.MAKE, role, make)


@pytest.mark.long
def test_it_counts_memory(soak, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(soak, "PARTS", 4)
    path = tmp_path / "soak.json"
    argv = ["--count", "100", "--warmup", "100", "--size", "64", "--json", str(path)]
    played_by(monkeypatch, leaking_server)
    assert soak.main([*argv, "--limit", "1000000"]) == 1
    out, err = capsys.readouterr()
    assert "100 push_pulls of 64 B each way" in out and "growth" in out
    assert "but the limit is 1000000" in err
    rows = json.loads(path.read_text())["rows"]
    assert [r["role"] for r in rows] == ["worker", "server"]
    for row in rows:
        sizes, growth, idle = row["resident_bytes"], row["growth"], row["idle"]
        assert len(sizes) == 1 + soak.PARTS and growth["resident_bytes"] == sizes[-1] - sizes[0]
        assert growth["goroutines"] == 0 and min(row["goroutines"]) > 0
        assert growth["engine_bytes"] == 0 and min(row["engine_bytes"]) > 0
        assert growth["go_bytes"] < 1_000_000 and row["go_bytes"][0] > row["engine_bytes"][0]
        assert len(row["malloc_bytes"]) == len(row["python_blocks"]) == 2
        assert idle["resident_bytes"] < 1_000_000 and idle["descriptors"] == 0
        assert min(row["descriptors"]) > 3
    worst = [row["growth"]["resident_bytes"] for row in rows]
    assert worst[0] < 1_000_000 < 100 * 65536 // 2 <= worst[1]


@pytest.mark.long
def test_it_counts_descriptors(soak, few_looks, monkeypatch, capsys):
    argv = ["--count", "20", "--warmup", "20", "--size", "64", "--limit", "100000000"]
    played_by(monkeypatch, hoarding_server)
    assert soak.main(argv) == 1
    assert "descriptors grew by" in capsys.readouterr().err


def test_it_counts_the_engine(soak, few_looks, monkeypatch, capsys):
    argv = ["--count", "10", "--warmup", "10", "--size", "64", "--limit", "100000000"]
    played_by(monkeypatch, opening_server)
    assert soak.main(argv) == 1
    assert "engine's heap grew by" in capsys.readouterr().err
