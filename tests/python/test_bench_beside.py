"""Other libraries beside ours in `fserver bench`: by gloo, which needs no GPU, and what becomes of
one that goes wrong."""

import contextlib
import json
import multiprocessing
import os
import re
import time

import pytest

from fserver import bench
from fserver.bench import libraries, team
from fserver.bench import options as opts
from fserver.bench.crew import Case
from fserver.bench.run import Way, take_turns

SIZES = [(64, 64), (4096, 64), (64, 65536)]
COUNT = 20
TRIPS = 3 + 2 * (2 + COUNT)  # of a case: those that are compared, and those that are timed


class OddSide(libraries.Rival):
    """Does something after one of its round trips; only the first side does."""

    at = 0

    def trip(self):
        super().trip()
        self.at += 1
        if self.index == 0:
            self.act()


class CorruptingSide(OddSide):
    def act(self):
        if self.at == TRIPS:
            self.route.landing[0, -1] ^= 1


class DyingSide(OddSide):
    def act(self):
        if self.at == TRIPS + 5:
            os._exit(9)


class HangingSide(OddSide):
    def act(self):
        if self.at == 5:
            time.sleep(1000)


class FailingSide(libraries.Rival):
    """The other one waits for it meanwhile."""

    def join(self, *args):
        if self.index:
            raise LookupError("there is no such thing here")
        super().join(*args)


class Ours:
    """In place of fserver."""

    unit = 1

    def check(self, seed):
        pass

    def measure(self, warmup, count):
        return {"iters": count, "p50_us": 1.0, "p99_us": 1.0}


def measured(monkeypatch, side=libraries.Rival):
    """Of each case, the figures of gloo, and why there are none. The other way always has some."""
    monkeypatch.setattr(libraries, "Rival", side)
    found = []
    with contextlib.ExitStack() as stack:
        [gloo], ours = libraries.beside(stack, ["gloo"], None, None, 1 << 16, None), Way("", Ours())
        for out, back in SIZES:
            with gloo.tried():
                if gloo.player:
                    gloo.player.prepare(Case("push_pull", (out,), (back,)))
            take_turns([ours, gloo], 2, 0, COUNT)
            assert len(ours.rounds) == 2
            found.append((gloo.rounds, gloo.reason))
    assert not multiprocessing.active_children()
    return found


def test_gloo(monkeypatch):
    for theirs, reason in measured(monkeypatch):
        assert reason is None and len(theirs) == 2
        for figures in theirs:
            assert figures["iters"] == COUNT and 0 < figures["p50_us"] <= figures["p99_us"]


def test_pingpong_beside_gloo(tmp_path):
    given, path = dict(os.environ), tmp_path / "rows.json"
    argv = ["pingpong", "--sizes", "64", "--rounds", "2", "--iters", "20", "--json", str(path)]
    assert bench.main([*argv, "--beside", "gloo,nccl"]) == 0
    assert dict(os.environ) == given
    rows = json.loads(path.read_text())["rows"]
    moved = [("push", 64, 0), ("pull", 64, 64), ("push_pull", 64, 64)]
    for i, (op, out, back) in enumerate(moved):
        ours, gloo, nccl = rows[3 * i : 3 * i + 3]
        assert [row["transport"] for row in (ours, gloo, nccl)] == ["cma", "gloo", "nccl"]
        for row in (ours, gloo, nccl):
            assert (row["op"], row["bytes_out"], row["bytes_back"]) == (op, out, back)
        assert 0 < gloo["p50_us"] <= gloo["p99_us"] and gloo["gbps"] >= 0
        assert (gloo["iters"], gloo["rounds"]) == (20, 2)
        assert gloo["baseline_p50_us_rounds"] == ours["baseline_p50_us_rounds"]
        assert gloo["baseline"] == ours["baseline"]
        assert nccl["skipped"] == "it takes tensors on GPUs" and nccl["p50_us"] is None


def test_one_that_brings_wrong_data(monkeypatch, capsys):
    (_, told), *_ = found = measured(monkeypatch, CorruptingSide)
    want = (
        r"the worker 0 received wrong data: what came: byte 63 of 64 is \d+, not \d+ \(exchange 3\)"
    )
    assert re.fullmatch(want, told) and found == [([], told)] * 3
    assert f"bench: gloo: {told}" in capsys.readouterr().err


def test_one_that_dies(monkeypatch):
    first, *later = measured(monkeypatch, DyingSide)
    assert first[1] is None and len(first[0]) == 2
    assert later == [([], "the worker 0 ended with status 9")] * 2


@pytest.mark.long
def test_one_that_hangs(fork_server, monkeypatch, capfd):
    monkeypatch.setattr(libraries, "LIMIT", 4.0)
    why = "no answer from worker 0 and server 0 within 4 s"
    assert measured(monkeypatch, HangingSide) == [([], why)] * 3
    assert " in act\n" in capfd.readouterr().err  # where it was


def test_one_that_cannot_start(monkeypatch, capsys):
    why = "LookupError: there is no such thing here"
    assert measured(monkeypatch, FailingSide) == [([], why)] * 3
    assert "Traceback" in (err := capsys.readouterr().err) and why in err


def test_those_of_gpus_take_two():
    with contextlib.ExitStack() as stack:
        names = (*opts.ON_GPUS, *opts.ON_CPU)
        ways = [*libraries.beside(stack, names, None, (0, 0), 64, None)]
    reasons = {way.name: way.reason for way in ways}
    assert reasons.pop("gloo") == "it takes tensors on the CPU"
    assert set(reasons.values()) == {"it takes two GPUs, and there is one"} and len(reasons) == 4


def test_those_of_gpus_have_their_environment_from_the_start(monkeypatch):
    started = []

    class NoTeam(team.Team):
        def __init__(self, shape, gpus, cores, actor, variables, limit):
            started.append(variables)
            raise OSError("not here")

    monkeypatch.setattr(libraries, "Team", NoTeam)
    with contextlib.ExitStack() as stack:
        [nccl] = libraries.beside(stack, ["nccl"], None, (0, 1), 64, None)
    assert started == [libraries.ENVIRONMENT] and nccl.reason == "not here"


def test_nixl_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: name == "nixl_cu12")
    assert libraries._unable("nixl", (0, 1)) is None
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    why = "no module of nixl_cu13, nixl_cu12, nixl is installed"
    assert libraries._unable("nixl", (0, 1)) == why
    assert libraries._unable("nccl", (0, 1)) is None and libraries._unable("gloo", None) is None


@pytest.mark.parametrize(
    ("count", "want"),
    [(9, ([], [])), (10, ([0, 2, 3, 5], [6, 7, 8, 9])), (12, ([0, 2, 3, 5, 6], [7, 8, 9, 10, 11]))],
)
def test_they_have_cores_of_their_own(count, want, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    started = []

    def start(self, members, limit):
        started.extend(members)
        raise OSError("enough")

    monkeypatch.setattr(team.Crew, "__init__", start)
    with contextlib.ExitStack() as stack:
        [*libraries.beside(stack, ["gloo"], None, None, 64, (1, 4))]
    assert tuple(member.cores for member in started) == want
