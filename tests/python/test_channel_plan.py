"""What the sides of a stream channel tell each other, and what they plan from it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
from functools import partial
from typing import Any

import pytest

import fserver
from fserver.channel import describe, gpu, plan, tune


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '{"v": 1}', '{"v": 2}',
        describe.text("kernel", "cpu", [[1, "float32", [-1]]], []),
        describe.text("kernel", "cpu", [[1, "storage", [1]]], []),
        describe.text("kernel", "cpu", [[1.5, "int8", [1]]], []),
        describe.text("kernel", "cpu", [[1, "int8", [1 << 60]]], []),
        describe.text("kernel", "cpu", [[1, "int8", [1] * 65]], []),
        describe.text("kernel", "cpu", [[1, "int8"]], []),
        describe.text("kernel", "cpu", [[1, "int8", [1]]] * 257, []),
        describe.text("no", "cpu", [], []), "[" * 5000,
    ],
)  # fmt: skip
def test_described_badly(text: str) -> None:
    with pytest.raises(fserver.Error, match="channel: peer 3 describes"):
        describe.read(3, text)


def test_more_rows_than_are_counted() -> None:
    torch = pytest.importorskip("torch")
    made = gpu.piece(torch.empty(plan.MOST_ROWS, 2, dtype=torch.uint8, device="meta"))
    assert (made.rows, made.row_bytes) == (plan.MOST_ROWS, 2)
    with pytest.raises(fserver.ShapeError, match="has 4294967296 rows"):
        gpu.piece(torch.empty(plan.MOST_ROWS + 1, dtype=torch.uint8, device="meta"))


class Memory:
    """A GPU for plans: gives out addresses, and keeps what it is asked to enqueue."""

    room = iter(range(1 << 40, 1 << 60, 1 << 32))

    def __init__(self, exportable: bool = True) -> None:
        self.exportable = exportable
        self.steps: dict[bool, Any] = {}
        self.threads: dict[bool, list[int]] = {}  # of a block, for each segment
        self.own: set[int] = set()

    def allocate(self, bytes: int) -> int:
        address = next(Memory.room)
        self.own.add(address)
        return address

    def share(self, address: int) -> tuple[bytes, int, int]:
        base = address >> 32 << 32
        if base not in self.own and not self.exportable:
            return b"", 0, 0
        return base.to_bytes(64, "little"), 1 << 32, address - base

    def map(self, handle: bytes, owner: str) -> tuple[int, int]:
        return int.from_bytes(handle, "little"), 1 << 32

    def reach(self, device: int) -> None:
        pass

    def plan(self, sends: bool, steps: list[Any], counts: int, dead: int) -> None:
        self.steps[sends] = [s for group, _ in steps for s in group]
        self.threads[sends] = [threads for group, threads in steps for _ in group]
        assert all(len(group) <= plan.MOST_SEGMENTS for group, _ in steps)

    def plan_copies(self, sends: bool, segments: list[Any]) -> None:
        self.steps[sends] = segments

    def begin(self, in_turn: bool, send_first: bool, flags: int, bytes: int) -> None:
        self.turns, self.flags = in_turn, (flags, bytes)


def pieces(sizes: list[int]) -> list[plan.Piece]:
    return [plan.Piece(next(Memory.room) + 4096, n, 1) for n in sizes]


@pytest.mark.parametrize("mode", ["kernel", "copy"])
@pytest.mark.parametrize("exportable", [True, False])
@pytest.mark.parametrize("one_way", [True, False])
@pytest.mark.parametrize("table", tune.CANDIDATES, ids=str)
def test_plan(mode: str, exportable: bool, one_way: bool, table: plan.Table) -> None:
    """Both sides' plans say the same of each tensor, and no two pieces of memory overlap."""
    sizes = [0, 1, 4096, 256 << 10, (256 << 10) + 1, 1 << 20, 64 << 20] * 6
    back = [] if one_way else [16, 3 << 20]
    a, b = Memory(exportable), Memory(exportable)
    out, into = pieces(sizes), pieces(sizes)
    w = plan.Plan(a, 0, mode, [out], [pieces(back)], True)
    s = plan.Plan(b, 1, mode, [pieces(back)], [into], False, table)
    s.attach(0, w.describe(0))
    w.attach(0, s.describe(0))
    w.install()
    s.install()
    assert a.turns is b.turns is not one_way
    used = []
    for n, sent, got in zip(sizes, a.steps[True], b.steps[False], strict=True):
        kind, to, flags, blocks = sent[2], sent[4], sent[5], sent[12]
        assert kind == got[2]
        if mode == "kernel":
            assert flags == got[5]
            assert blocks == (got[10] if kind == plan.PLACE else got[12]) <= plan.MOST_BLOCKS
            assert bool(sent[6]) == bool(got[6]) == one_way
        assert to == (got[4] if kind == plan.PLACE else got[3])
        if kind != plan.PLACE:
            size = 16 * (math.ceil(n / 8) + 1 + sent[10]) if kind == plan.PACKETS else n
            used.append((to, to + size))
        used.append((got[7], got[7] + 8))
    for side in (a, b):
        flags, size = side.flags
        used.append((flags, flags + size))
        words = [got[5] for got in side.steps[False]] + [sent[6] for sent in side.steps[True]]
        assert all(flags <= at <= flags + size - 4 for at in words if at)
        assert mode == "kernel" or size % plan.FILL == 0
    used.sort()
    assert all(end <= begin for (_, end), (begin, _) in zip(used, used[1:], strict=False))


def dealt(kind: int, size: int, blocks: int, threads: int) -> list[int]:
    """Which block of a segment has each unit of its landing buffer, as copy_share and Packets of
    channel.cu deal them."""
    if kind == plan.PACKETS:
        return [i // threads % blocks for i in range(math.ceil(size / 8) + 1)]
    whole = size // 16
    per = math.ceil(whole / blocks)
    return [i // per for i in range(whole)] + [blocks - 1] * (size % 16 > 0)


@pytest.mark.parametrize("exportable", [True, False])
@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("part", [1, 2, 7])
def test_credits(exportable: bool, peers: int, part: int) -> None:
    """A sender that goes one way waits for the words of all blocks of the receiver (credit of
    channel.cu). Its blocks overwrite what other blocks there have read: of fewer rows it copies
    other shares, and in other launches it has other numbers of threads."""
    sizes = [4 << 20, 200 << 10, 200 << 10, (1 << 20) + 7, 200 << 10]
    sender, receivers = Memory(exportable), [Memory(exportable) for _ in range(peers)]
    w = plan.Plan(sender, 0, "kernel", [pieces(sizes)] * peers, [[]] * peers, True)
    for i, memory in enumerate(receivers):
        s = plan.Plan(memory, i + 1, "kernel", [[]], [pieces(sizes)], False)
        w.attach(i, s.describe(0))
        s.attach(0, w.describe(i))
        s.install()
    w.install()
    others = set()  # kinds with blocks whose own word is not enough
    got = [segment for memory in receivers for segment in memory.steps[False]]
    theirs = [threads for memory in receivers for threads in memory.threads[False]]
    for a, b, threads, other in zip(
        sender.steps[True], got, sender.threads[True], theirs, strict=True
    ):
        kind, size, blocks = a[2], a[8], a[12]
        if kind == plan.PLACE:
            assert b[12] == 1
            continue
        assert b[12] == blocks
        here = dealt(kind, size if kind == plan.PACKETS else size // part, blocks, threads)
        there = dealt(kind, size, blocks, other)
        assert set(there) <= set(range(blocks))
        if any(x != y for x, y in zip(here, there, strict=False)):
            others.add(kind)
    assert (plan.LANDING in others) == (part > 1 and not exportable)
    assert plan.PACKETS in others or not exportable


@pytest.mark.parametrize("best", range(len(tune.CANDIDATES)))
def test_tune(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each trial one side has the table that H200 have; each takes its own best."""
    opened: dict[bool, list[tuple[str, plan.Table]]] = {True: [], False: []}

    class Trial(contextlib.AbstractContextManager[Any]):
        path = "kernel"

        def __init__(self, side: bool, name: str, table: plan.Table) -> None:
            opened[side].append((name, table))
            self.table = table

        def __exit__(self, *error: object) -> None:
            pass

    def seconds(trial: Any, send_first: bool) -> float:
        return 1.0 if trial.table == tune.CANDIDATES[best] else 1.2

    monkeypatch.setattr(tune, "_seconds", seconds)
    for side in opened:
        table = tune.tuned(partial(Trial, side), side)  # type: ignore[arg-type]
        assert table == tune.CANDIDATES[best]
    for (name, ours), (same, theirs) in zip(opened[True], opened[False], strict=True):
        assert name == same and plan.TABLE in (ours, theirs)
    assert [sum(table == c for _, table in opened[True]) for c in tune.CANDIDATES[1:]] == [1] * 5


def test_tune_takes_what_is_measured_for_noise() -> None:
    count = len(tune.CANDIDATES)
    assert tune.choose([1.0] + [0.98] * (count - 1)) == plan.TABLE
    assert tune.choose([1.0] * (count - 1) + [0.9]) == tune.CANDIDATES[-1]


def test_tune_and_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that goes during a trial ends the opening, and the trial's channel is closed."""
    closed = []

    class Trial(contextlib.AbstractContextManager[Any]):
        path = "kernel"

        def __exit__(self, *error: object) -> None:
            closed.append(self)

    def lost(trial: Any, send_first: bool) -> float:
        raise fserver.PeerLostError("server 0 is gone")

    monkeypatch.setattr(tune, "_seconds", lost)
    with pytest.raises(fserver.PeerLostError):
        tune.tuned(lambda name, table: Trial(), True)  # type: ignore[arg-type, return-value]
    assert len(closed) == 1


def test_plan_of_a_liar() -> None:
    """No description makes a side use memory that the peer has not named."""
    random.seed(7)
    sizes = [100, 1 << 20]
    s = plan.Plan(Memory(), 1, "kernel", [[]], [pieces(sizes)], False)
    honest = s.describe(0)
    for _ in range(500):
        theirs = {**honest, "proof": "", "in": [dict(e) for e in honest["in"]]}
        entry = random.choice(theirs["in"])
        field = random.choice(list(entry))
        lie: Any = random.choice([-1, 1 << 33, 1 << 70, None, "x", [0], [9, 0], 3.5, [0, -4]])
        entry[field] = lie
        w = plan.Plan(Memory(), 0, "kernel", [pieces(sizes)], [[]], True)
        try:
            w.attach(0, theirs)
        except fserver.Error:
            continue
        assert field in ("stride", "bytes", "blocks", "kind") or lie in ([0], 0)
    for field in ("mode", "turn", "memory", "in", "out"):
        w = plan.Plan(Memory(), 0, "kernel", [pieces(sizes)], [[]], True)
        with pytest.raises(fserver.Error):
            w.attach(0, {**honest, field: 99})


def test_misaligned_places() -> None:
    """A store there ends the CUDA context of this process."""
    told = plan.Plan(Memory(), 1, "kernel", [pieces([8])], [pieces([100])], False).describe(0)
    [packets], [credits] = told["in"], told["out"]
    for wrong in (
        {"in": [{**packets, "at": [0, packets["at"][1] + 8]}]},
        {"in": [{**packets, "flags": packets["flags"] + 4}]},
        {"in": [{**packets, "counted": packets["counted"] + 4}]},
        {"out": [credits + 2]},
    ):
        for lie in ({}, wrong):
            w = plan.Plan(Memory(), 0, "kernel", [pieces([100])], [pieces([8])], True)
            with (
                pytest.raises(fserver.Error, match="malformed") if lie else contextlib.nullcontext()
            ):
                w.attach(0, {**told, "proof": "", **lie})


@pytest.mark.parametrize("mode", ["kernel", "copy"])
@pytest.mark.parametrize("worker", [True, False])
def test_plan_numbers_the_row_counts(mode: str, worker: bool) -> None:
    """A worker gives one for each of its tensors, which go to all servers; a server one for each
    tensor of each worker."""
    ours = pieces([100, 1 << 20])
    memory = Memory()
    mine = plan.Plan(memory, 0, mode, [ours, ours], [[], []], worker)
    for peer in range(2):
        into = pieces([100, 1 << 20])
        theirs = plan.Plan(Memory(), peer, mode, [[]], [into], not worker)
        mine.attach(peer, theirs.describe(0))
    mine.install()
    numbers = [segment[0] for segment in memory.steps[True]]
    assert sorted(numbers) == ([0, 0, 1, 1] if worker else [0, 1, 2, 3])


def test_plan_takes_no_address_of_another_process() -> None:
    """Two nodes of one process use each other's memory as it is; who repeats what they have told,
    and a process that was forked from theirs, name it by handles."""

    class Own(Memory):
        mapped = False

        def map(self, handle: bytes, owner: str) -> tuple[int, int]:
            self.mapped = True
            return super().map(handle, owner)

    def mapped(theirs: Any) -> bool:
        memory = Own()
        plan.Plan(memory, 0, "kernel", [pieces([100])], [[]], True).attach(0, theirs)
        return memory.mapped

    server = plan.Plan(Memory(), 1, "kernel", [[]], [pieces([100])], False)
    honest = json.loads(json.dumps(server.describe(0)))
    assert not mapped(honest)
    assert mapped({**honest, "memory": [[h, 1 << 61, at] for h, _, at in honest["memory"]]})
    assert mapped({**honest, "proof": "x"})
    theirs = plan.Plan(Memory(), 0, "kernel", [pieces([100])], [[]], True).describe(0)
    assert mapped({**honest, "proof": theirs["proof"]})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(server.describe(0)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert mapped(json.loads(os.read(read, 1 << 16)))
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (0, 1), (1, 0), (0, 7)])
def test_plan_and_the_numbers_of_gpus(own: bool, mine: int, theirs: int) -> None:
    """What a peer's process calls its GPU says nothing here, where CUDA_VISIBLE_DEVICES may have
    given the numbers to others: its memory is named by handles. In one process the numbers are the
    same."""

    class Asked(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.reached: list[int] = []
            self.owners: list[str] = []

        def reach(self, device: int) -> None:
            self.reached.append(device)

        def map(self, handle: bytes, owner: str) -> tuple[int, int]:
            self.owners.append(owner)
            return super().map(handle, owner)

    memory = Asked()
    ours, into = pieces([1 << 20]), pieces([1 << 20])
    server = plan.Plan(Memory(), theirs, "kernel", [[]], [into], False)
    told = server.describe(0)
    worker = plan.Plan(memory, mine, "kernel", [ours], [[]], True)
    worker.attach(0, told if own else {**told, "proof": ""})
    worker.install()
    assert memory.reached == ([theirs] if own else [])
    assert memory.owners == (
        [] if own else [f"gpu {theirs} of peer 0, as its process counts"] * len(told["memory"])
    )
    [segment] = memory.steps[True]
    assert segment[3:5] == (ours[0].address, into[0].address)
