"""`fserver bench graph` on the CPU: the program, not the speed; its options, and its arithmetic."""

import contextlib
import json
import re
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from dry import DryCheckedSide, dry, on_graphs

from fserver import bench
from fserver.bench import graph
from fserver.bench.errors import BenchError
from fserver.bench.graph import overlap, traffic
from fserver.bench.team import Team

__all__ = ("dry",)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["graph", "trips", "--runs", "0"], "--runs: '0': want a whole number, 1 or more"),
        (["graph", "overlap", "--rounds", "-1"], "--rounds: '-1': want a whole number, 1 or more"),
        (["graph", "overlap", "--ms", "0"], "--ms: '0': want"),
    ],
)
def test_wrong_options(argv, text, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(argv)
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_a_disk_that_is_full(dry):
    argv = "af --modes copy --beside none --workers 1 --layers 1 --stages 1 --rows 1 --width 4"
    with pytest.raises(BenchError, match="--json /dev/full: No space left"):
        graph.main([*argv.split(), "--replays", "1", "--json", "/dev/full"])


@pytest.mark.parametrize("count", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_graph(dry, tmp_path, count):
    """On the CPU: the program, not the speed."""
    path = tmp_path / "rows.json"
    argv = ["--workers", count, "--layers", "3", "--stages", "2", "--rows", "2"]
    argv += ["--width", "64", "--replays", "3", "--modes", "copy", "--beside", "nccl"]
    assert bench.main(["graph", "af", *argv, "--json", str(path)]) == 0
    two, one, nccl = json.loads(path.read_text())["rows"]
    assert [(row["mode"], row["streams"]) for row in (two, one)] == [
        ("copy", "two"),
        ("copy", "one"),
    ]
    assert nccl["by"] == "nccl"
    for row in (two, one, nccl):
        assert row["wrong"] == 0 and row["micro_batch_us"] > 0


def test_graph_overlap(dry, tmp_path):
    """On the CPU: the program, not the speed."""
    path = tmp_path / "rows.json"
    argv = "--workers 1 --layers 2 --stages 2 --rows 2 --width 64 --size 32 --rounds 3 --ms 8"
    argv += " --modes copy --seconds 2 --beside nccl"
    assert bench.main(["graph", "overlap", *argv.split(), "--json", str(path)]) == 0
    *ours, nccl = json.loads(path.read_text())["rows"]
    assert [row["compute"] for row in ours] == [False, True] and nccl["by"] == "nccl"
    for row in (*ours, nccl):
        low, high = row["between"]
        assert low <= row["gemms_slowed_percent"] <= high
        assert row["wrong"] == 0 and row["rounds"] == 3


class Messages:
    """Ways that bring what a server would send, and nobody to meet."""

    index, is_worker, peers = 0, True, [1]
    stream = captured = lambda *_: None
    barrier = sync = lambda self: None


def test_wrong_bytes_are_counted():
    source, landing = (torch.zeros(1, n, dtype=torch.uint8) for n in (4096, 300))
    brings = 300

    def recv():
        landing[0, :brings] = t._bytes(landing, 1, 0)[:brings]

    t = traffic.Traffic(Messages(), [traffic.Route(source, landing, lambda: None, recv)], 2)
    assert t.checked() == 0
    first = source.clone()
    brings = 298
    assert t.checked() == 2 and bool((source != first).all())
    brings = 0
    assert t.checked() == 300
    t.checks += 1  # what came is of the check before
    assert t.wrong() == 300


def test_graph_overlap_compares_what_was_beside():
    """A block takes 1 ms alone and 3 beside traffic, which begins late, and once ends late."""
    ends, at, traffic = [0.0], 0.0, []
    for part in range(5):
        for i in range(overlap.BLOCKS):
            at += 3.0 if part % 2 and i >= 2 or part == 2 and i < 2 else 1.0
            ends.append(at)
    for part in (1, 3):
        first = ends[part * overlap.BLOCKS + 2]
        last = ends[(part + 1) * overlap.BLOCKS + (2 if part == 1 else 0)]
        traffic.append([(first - 0.5, first), (first, (first + last) / 2), (last - 1, last)])
    rows = overlap.compared(ends, traffic)
    assert [row["blocks"] for row in rows] == [[8, 8, 7], [7, 6, 8]]
    assert [row["slowed"] for row in rows] == [2.0, 2.0] and rows[0]["noise"] == 0.0
    assert overlap.compared(ends, [[(0.0, 0.1), (0.1, at)]]) == []


def test_graph_overlap_counts_rounds_of_a_steady_clock():
    args = Namespace(rounds=4)

    def side(*rounds):
        return {"rounds": [{"slowed": s, "noise": n} for s, n in rounds]}

    steady = side((0.001, 0.0), (0.002, -0.002), (0.003, 0.003), (0.2, 0.01), (-0.2, -0.01))
    [row] = overlap.summary([side((0.0, 0.0)), steady], args)
    assert row["gemms_slowed_percent"] == 0.2
    assert (row["rounds"], row["of"], row["between"]) == (3, 5, [0.1, 0.3])
    for other, counts in ((side((0.1, 0.01)), [5, 1]), (side(), [5, 0])):
        with pytest.raises(BenchError, match=re.escape(f"no steady round, of {counts} ")):
            overlap.summary([steady, other], args)


def test_the_timeline_dry():
    """What came is looked at, of each kind."""
    with Team((1, 1), actor=DryCheckedSide) as team:
        for kind in ("eager", "copy", "copy graph", "kernel"):
            what = {"kind": kind, "shape": (0, 0, 2, 64), "trips": 3}
            for side in graph.play(team, on_graphs.zero_sm, what, 20):
                assert side["wrong"] == 0 and not side["control"]
                assert side["transport"] == ("cma" if kind == "eager" else "host")


@pytest.mark.parametrize(
    ("streams", "worker", "server"),
    [
        (
            "one",
            "main:send0 main:send1 main:recv0 main:send0 main:recv1 main:send1 main:recv0 "
            "main:recv1",
            "main:recv0 main:send0 main:recv1 main:send1 main:recv0 main:send0 main:recv1 "
            "main:send1",
        ),
        (
            "two",
            "1<main 1:send0 1<main 1:send1 main:recv0 1<main 1:send0 main:recv1 1<main "
            "1:send1 main:recv0 main:recv1 main<1",
            "main:recv0 1<main 1:send0 main:recv1 1<main 1:send1 main:recv0 1<main 1:send0 "
            "main:recv1 1<main 1:send1 main<1",
        ),
    ],
)
def test_streams(monkeypatch, streams, worker, server):
    """Which calls are on which stream, and which stream waits for which (<)."""
    done, names = [], iter(("main", "1"))

    class Stream:
        def __init__(self, *_):
            self.name = next(names)

        def wait_stream(self, other):
            done.append(f"{self.name}<{other.name}")

    current = []

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])

    def call(what):
        return lambda: done.append(f"{current[-1].name}:{what}")

    for is_worker, want in ((True, worker), (False, server)):
        names = iter(("main", "1"))
        side = SimpleNamespace(is_worker=is_worker, stream=Stream)
        ways = [traffic.Route(None, None, call(f"send{i}"), call(f"recv{i}")) for i in (0, 1)]
        t = traffic.Traffic(side, ways, 2, streams)
        with torch.cuda.stream(t.main):
            t.body()
        assert " ".join(done) == want
        done.clear()


def hoarding(side, **what):
    """The side keeps a thousand objects at each check of its channels."""

    class Hoard(on_graphs.Model):
        kept = []

        def meet(self):
            super().meet()
            self.kept += [object() for _ in range(1000)]

    on_graphs.Model = Hoard
    return on_graphs.memory(side, **what)


@pytest.mark.long
def test_memory_dry():
    """It counts exchanges and what grows."""
    what = {"mode": "copy", "shape": (3, 2, 2, 64), "exchanges": 60, "seconds": 5}
    how = {"actor": DryCheckedSide, "variables": on_graphs.by_the_byte()}
    with Team((1, 1), **how) as team:
        for function, seen in ((on_graphs.memory, False), (hoarding, True)):
            for side in graph.play(team, function, dict(what), 20):
                assert side["wrong"] == 0 and side["exchanges"] == 60
                assert side["growth"].keys() >= {*on_graphs.LIMITS, "engine_bytes"}
                assert (side["growth"]["python_blocks"] >= 5000) == seen


def test_graph_wants_gpus(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main(["graph", "af"]) == 1
    assert "torch sees 0 GPUs, want 2 (or CUDA's MPS)" in capsys.readouterr().err
