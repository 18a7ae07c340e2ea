"""Others' ways beside ours in `fserver bench`: by gloo, which needs no GPU, and what becomes of one
that goes wrong."""

import contextlib
import json
import multiprocessing
import os
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from fserver import bench
from fserver.bench import beside, matrix, others, pingpong
from fserver.bench.crew import Nodes

FEW = ["--rounds", "2", "--iters", "20", "--no-baseline"]
TRIPS = 2 * (2 + 20 + 1) + 1  # of a case of those


class OddSide(beside.Side):
    """Does something at one of its recvs; only the first side does."""

    at = 0

    def open(self, out, into):
        way = self.joined(out, into)
        recv = way.recv

        def odd():
            recv()
            OddSide.at += 1
            if self.index == 0:
                self.act(OddSide.at, way)

        way.recv = odd
        return way

    def __init__(self, *args):
        super().__init__(*args)
        self.joined, self.open = self.open, type(self).open.__get__(self)


class CorruptingSide(OddSide):
    def act(self, at, way):
        if at == TRIPS:
            way.landing[-1] ^= 1


class DyingSide(OddSide):
    def act(self, at, way):
        if at == TRIPS + 5:
            os._exit(9)


class HangingSide(OddSide):
    def act(self, at, way):
        if at == 5:
            time.sleep(1000)


class FailingSide(beside.Side):
    """Of the two it is the other that fails first, as this one is gone."""

    def __init__(self, place, *args):
        if place.role == "server":
            args[1].close()
            time.sleep(0.5)
            absent = [name for name in others.ENVIRONMENT if name not in os.environ]
            raise LookupError(f"there is no such thing here, and {absent} is not set")
        super().__init__(place, *args)


def measured(path: Path, nodes: Nodes, *argv: str) -> list[dict]:
    argv = ["--json", str(path), "--ops", "push_pull", "--sizes", "64,4K,64K", *FEW, *argv]
    assert pingpong.main(argv, nodes) == 0
    assert not multiprocessing.active_children()
    return json.loads(path.read_text())["rows"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.json"


def test_pingpong_beside_gloo(path):
    given = dict(os.environ)
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


def test_matrix_beside_gloo(path):
    argv = ["--sizes", "64", "--ops", "pull", "--places", "local,joint", "--json", str(path)]
    assert matrix.main([*argv, *FEW, "--beside", "gloo"]) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if row["device"] == "cpu"]
    assert [row["place"] for row in rows] == ["local", "local", "joint"]
    assert rows[1]["transport"] == "gloo" and rows[1]["p50_us"] > 0


def test_other_that_brings_wrong_data(path, capsys):
    rows = measured(path, Nodes(other=CorruptingSide), "--beside", "gloo")
    assert [row["transport"] for row in rows] == ["cma", "gloo"] * 3
    assert all(row["p50_us"] > 0 for row in rows[::2])
    for row in rows[1::2]:
        assert row["skipped"].startswith("the worker received wrong data: byte 63 of 64 is ")
        assert row["p50_us"] is None and row["p50_us_rounds"] == []
    assert "bench: gloo:\nthe worker received wrong data: byte 63 of 64" in capsys.readouterr().err


def test_other_that_dies(path):
    rows = measured(path, Nodes(other=DyingSide), "--beside", "gloo")
    assert all(row["p50_us"] > 0 for row in rows[::2])
    first, *later = rows[1::2]
    assert first["p50_us"] > 0 and first["skipped"] is None
    assert later[0]["skipped"] == later[1]["skipped"]
    assert "crashed, or hung" in later[0]["skipped"] or "ended with" in later[0]["skipped"]


def test_other_that_hangs(path, monkeypatch, capfd):
    forkserver._forkserver._stop()  # the next one has the standard error of this test
    monkeypatch.setattr(beside, "LIMIT", 4.0)
    rows = measured(path, Nodes(other=HangingSide), "--beside", "gloo")
    assert all(row["p50_us"] > 0 for row in rows[::2])
    assert all(
        row["skipped"] == "no answer from worker and server within 6 s" for row in rows[1::2]
    )
    assert " in act\n" in capfd.readouterr().err  # where it was


def test_other_that_cannot_start(path, capsys):
    rows = measured(path, Nodes(other=FailingSide), "--beside", "gloo")
    assert all(row["p50_us"] > 0 for row in rows[::2])
    why = "LookupError: there is no such thing here, and [] is not set"
    assert [row["skipped"] for row in rows[1::2]] == [why] * 3
    assert "Traceback" in (err := capsys.readouterr().err) and why in err


def test_others_take_two_gpus():
    with contextlib.ExitStack() as stack:
        players = beside.beside(stack, beside.WAYS, (0, 0), 64, None, Nodes())
    reasons = {player.way: player.reason for player in players}
    assert reasons.pop("gloo") == "it takes tensors on the CPU"
    assert set(reasons.values()) == {"it takes two GPUs, and there is one"} and len(reasons) == 4


def test_others_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    assert beside._apart((1, 4)) == ([0, 2, 3, 5], [6, 7, 8, 9])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert beside._apart((1, 4)) == beside._apart(None) == ([], [])


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
        ("the worker failed:\nConnectionResetError: [Errno 104] Connection reset by peer\n"
         "the server failed:\nValueError: no", "ValueError: no"),
        ("side 1: EOFError()",
         "side 1: EOFError(): it crashed, or hung and was ended; standard error says where"),
    ],
)  # fmt: skip
def test_reason(text: str, want: str) -> None:
    assert others.reason(AssertionError(text) if text else AssertionError()) == want
