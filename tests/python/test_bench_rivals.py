"""Other libraries beside ours in `fserver bench`: by gloo, which needs no GPU, and what becomes of
one that goes wrong."""

import contextlib
import json
import multiprocessing
import os
import time
from multiprocessing import forkserver

import pytest

from fserver import bench
from fserver.bench import libraries, rivals, team
from fserver.bench import options as opts
from fserver.bench.crew import Nodes
from fserver.bench.turns import take_turns

SIZES = [(64, 64), (4096, 64), (64, 65536)]
COUNT = 20
TRIPS = 2 * (2 + COUNT + 1) + 1  # of a case of those


class OddActor(rivals.RivalActor):
    """Does something after one of its round trips; only the first side does."""

    at = 0

    def trip(self):
        super().trip()
        self.at += 1
        if self.index == 0:
            self.act()


class CorruptingActor(OddActor):
    def act(self):
        if self.at == TRIPS:
            self.way.landing[-1] ^= 1


class DyingActor(OddActor):
    def act(self):
        if self.at == TRIPS + 5:
            os._exit(9)


class HangingActor(OddActor):
    def act(self):
        if self.at == 5:
            time.sleep(1000)


class FailingActor(rivals.RivalActor):
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


def measured(monkeypatch, actor=rivals.RivalActor):
    """Of each case, the figures of ours and of gloo, and why there are none of gloo."""
    monkeypatch.setattr(rivals, "RivalActor", actor)
    found = []
    with contextlib.ExitStack() as stack:
        [gloo] = rivals.beside(stack, ["gloo"], None, 1 << 16, None, Nodes())
        for sizes in SIZES:
            gloo.prepare(*sizes)
            ours, theirs = take_turns([Ours(), gloo], 2, 0, COUNT)
            assert len(ours) == 2
            found.append((theirs, gloo.reason))
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
    told = "the worker 0 received wrong data: what came: byte 63 of 64 is "
    for theirs, reason in measured(monkeypatch, CorruptingActor):
        assert reason.startswith(told) and theirs == []
    assert f"bench: gloo:\n{told}" in capsys.readouterr().err


def test_one_that_dies(monkeypatch):
    first, *later = measured(monkeypatch, DyingActor)
    assert first[1] is None and len(first[0]) == 2
    assert later == [([], "the worker 0 ended with status 9")] * 2


def test_one_that_hangs(monkeypatch, capfd):
    forkserver._forkserver._stop()  # the next one has the standard error of this test
    monkeypatch.setattr(rivals, "LIMIT", 4.0)
    why = "no answer from worker 0 and server 0 within 6 s"
    assert measured(monkeypatch, HangingActor) == [([], why)] * 3
    assert " in act\n" in capfd.readouterr().err  # where it was


def test_one_that_cannot_start(monkeypatch, capsys):
    why = "LookupError: there is no such thing here"
    assert measured(monkeypatch, FailingActor) == [([], why)] * 3
    assert "Traceback" in (err := capsys.readouterr().err) and why in err


def test_those_of_gpus_take_two():
    with contextlib.ExitStack() as stack:
        players = rivals.beside(stack, (*opts.ON_GPUS, *opts.ON_CPU), (0, 0), 64, None, Nodes())
    reasons = {player.way: player.reason for player in players}
    assert reasons.pop("gloo") == "it takes tensors on the CPU"
    assert set(reasons.values()) == {"it takes two GPUs, and there is one"} and len(reasons) == 4


def test_those_of_gpus_have_their_environment_from_the_start(monkeypatch):
    started = []

    class NoTeam(team.Team):
        def __init__(self, actor, shape, args, cores, variables, nodes):
            started.append(variables)
            raise OSError("not here")

    monkeypatch.setattr(rivals, "Team", NoTeam)
    with contextlib.ExitStack() as stack:
        [nccl] = rivals.beside(stack, ["nccl"], (0, 1), 64, None, Nodes())
    assert started == [libraries.ENVIRONMENT] and nccl.reason == "not here"


def test_nixl_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: name == "nixl_cu12")
    assert rivals._unable("nixl", (0, 1)) is None
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    why = "no module of nixl_cu13, nixl_cu12, nixl is installed"
    assert rivals._unable("nixl", (0, 1)) == why
    assert rivals._unable("nccl", (0, 1)) is None and rivals._unable("gloo", None) is None


def test_they_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    assert rivals._apart((1, 4)) == ([0, 2, 3, 5], [6, 7, 8, 9])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert rivals._apart((1, 4)) == rivals._apart(None) == ((), ())


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("", "AssertionError()"),
        ("plain", "plain"),
        ("the worker 0 failed: \nTraceback:\n  raise x\nValueError: wrong data: 3 of 8 bytes\n",
         "ValueError: wrong data: 3 of 8 bytes"),
        ("the worker 0 failed: \nTimeoutError: the other side does not answer\n\n"
         "the server 0 failed:\n  File\ntorch.AcceleratorError: CUDA error: no\nMight be late\n",
         "torch.AcceleratorError: CUDA error: no"),
        ("the worker 0 failed:\nConnectionResetError: [Errno 104] Connection reset by peer\n"
         "the server 0 failed:\nValueError: no", "ValueError: no"),
        ("the worker 0 failed: \nEOFError\nthe server 0 ended with status -11",
         "the server 0 ended with status -11"),
        ("the worker 0 failed: \nEOFError",
         "EOFError: it crashed, or hung and was ended; standard error says where"),
    ],
)  # fmt: skip
def test_reason(text: str, want: str) -> None:
    assert rivals.reason(AssertionError(text) if text else AssertionError()) == want
