"""`fserver bench graph trips` on the CPU: the program, not the speed; and what the loop over the
works does with one that fails."""

import json
import os
import time
from pathlib import Path

import pytest
from dry import dry

from fserver import bench
from fserver.bench import baseline, crew
from fserver.bench.errors import BenchError
from fserver.bench.graph import trips

__all__ = ("dry",)


@pytest.fixture
def path(tmp_path, dry):
    return tmp_path / "rows.json"


def run(path: Path, *argv: str) -> tuple[int, list[dict]]:
    """Exit status and rows."""
    status = bench.main(["graph", "trips", "--json", str(path), *argv])
    return status, json.loads(path.read_text())["rows"]


@pytest.mark.long
def test_trips(path):
    status, (raw, *rows) = run(path, "--runs", "3", "--modes", "kernel", "--beside", "nccl")
    assert raw["by"] == "raw" and "no-such-nvcc: not found" in raw["skipped"]
    assert status == 0 and all(row["work"] == "trips" for row in rows)
    ours = [row for row in rows if "by" not in row]
    hows = ("graph x200", "graph x20", "enqueued x20")
    sizes = [*trips.SIZES, (1 << 20, 8)]
    done = [(row["how"], (row["push"], row["pull"])) for row in ours]
    assert done == [(how, size) for how in hows for size in sizes]
    nccl = [row for row in rows if row.get("by") == "nccl"]
    for row in (*ours, *nccl):
        assert row["wrong"] == 0 and row["runs"] == 3
        assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"]
    assert all("gpu_p50_us" in row and row["gb_per_s"] > 0 for row in (*ours, *nccl))
    work = [(how, size) for how in hows[:0:-1] for size in sizes]
    assert [(row["how"], (row["push"], row["pull"])) for row in nccl] == work


def test_trips_through_the_engine(path):
    status, (_, *rows) = run(path, "--runs", "1", "--modes", "host", "--beside", "none")
    assert status == 0
    assert [(row["transport"], row["push"]) for row in rows] == [
        (transport, push) for transport in ("cma", "tcp") for push, _ in trips.SIZES
    ]
    assert all(row["p50_us"] > 0 and row["mode"] == "host" for row in rows)


def test_host_is_for_trips_alone(capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(["graph", "af", "--modes", "copy,host"])
    assert end.value.code == 2
    assert "--modes: 'host': want some of kernel, copy with af" in capsys.readouterr().err


# What the sides do in place of the works.


def good(side, **what):
    return {"p50_us": float(os.getpid()), "wrong": 0}


def wrong(side, **what):
    return {"p50_us": 1.0, "wrong": 3 if side.index else 0}


def failing(side, **what):
    if side.index:
        raise LookupError("nothing here")
    side.exchange(None)


def stuck(side, **what):
    if side.index:
        raise LookupError("nothing here")
    time.sleep(1000)


def dying(side, **what):
    if side.index:
        os._exit(7)
    side.exchange(None)


def planned(monkeypatch, *work, limit=20.0):
    monkeypatch.setattr(trips, "rows", lambda *_: [(f, what, limit) for f, what in work])


def test_what_fails_of_others_is_skipped_and_the_rest_goes_on(path, monkeypatch, capsys):
    monkeypatch.setattr(crew, "PARTING_S", 0.5)
    first, second = {"how": "graph x20", "by": "nccl"}, {"how": "enqueued x20", "by": "nccl"}
    mine = {"mode": "copy", "how": "graph x20"}
    work = (failing, first), (good, first), (dying, second), (good, mine), (good, mine)
    planned(monkeypatch, *work)
    status, rows = run(path)
    assert status == 0
    assert [row.get("skipped") for row in rows[:2]] == ["LookupError: nothing here"] * 2
    assert rows[2]["skipped"] == "the server 0 ended with status 7"
    assert 1 < rows[3]["p50_us"] == rows[4]["p50_us"]  # the same process
    assert capsys.readouterr().err.count("LookupError: nothing here\n") == 1


def test_a_side_that_fails_ends_one_that_hangs(path, monkeypatch):
    """Not after the limit, but soon."""
    monkeypatch.setattr(crew, "PARTING_S", 0.5)
    planned(monkeypatch, (stuck, {"how": "graph x20", "by": "nccl"}), limit=900.0)
    assert run(path)[1][0]["skipped"] == "LookupError: nothing here"


def test_processes_of_others_do_nothing_else(path, monkeypatch):
    work = [{"mode": "kernel"}, {"by": "nccl"}, {"by": "nccl"}, {"mode": "kernel"}]
    planned(monkeypatch, *((good, {"how": "one way", **what}) for what in work))
    status, rows = run(path)
    pids = [row["p50_us"] for row in rows]
    assert status == 0 and pids[1] == pids[2] and len(set(pids)) == 3


def test_what_fails_of_ours_fails(path, monkeypatch, capsys):
    mine = {"mode": "kernel", "how": "one way"}
    planned(monkeypatch, (failing, mine), (good, mine), (wrong, mine), (good, mine))
    status, rows = run(path)
    assert status == 1 and len(rows) == 3  # no more after two
    assert "nothing here" in rows[0]["error"] and rows[2]["wrong"] == 3
    out, err = capsys.readouterr()
    failed = "FAIL work=trips  mode=kernel  how=one way"
    assert f"{failed}  error=LookupError: nothing here\n" in out
    assert f"{failed}  p50_us=1.0  wrong=3" in out
    assert "fserver: the server 0 failed: \nTraceback" in err


def raw(side, **what):
    return {"rows": [{"what": "kernels", "p50_us": n} for n in (1, 2)], "wrong": 0}


def test_rows_of_a_program(path, monkeypatch):
    planned(monkeypatch, (raw, {"by": "nccl"}))
    status, rows = run(path)
    assert status == 0 and [row["p50_us"] for row in rows] == [1, 2]
    assert all(row["what"] == "kernels" and row["by"] == "nccl" for row in rows)


def test_the_program_in_cuda_wants_its_compiler(monkeypatch):
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(BenchError, match="no-such-nvcc: not found: .* nvcc of CUDA"):
        baseline.compiled("rawchannel.cu")
