"""Two workers, whose processes share a GPU, and a server on another one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import peers
import pytest
from peers import Child, Process

WAIT_MS = 15000.0
WORDS = (1 << 22) - 1024  # of a channel's tensor: the most that kernels copy
BYTES = 24 << 20  # of a push
TURNS = 50


def _node(role: str, scheduler: str, device: int | None, rank: int, **more: Any) -> Any:
    import fserver

    options = {**peers.options(device, "auto"), "workers": 2, "node_rank": rank, **more}
    return getattr(fserver, role)(scheduler=scheduler, connect=False, **options)


def _settle(device: int | None) -> None:
    import torch

    torch.cuda.current_stream(device).synchronize()


def serve(pipe: Connection, device: int | None, mode: str, lives: int) -> list[str]:
    """Answers both workers, in turn by a channel and by a batch, until worker 1 is killed; then
    whoever asks, until all open another channel. The last time they leave."""
    import torch

    import fserver

    bad = []
    torch.cuda.set_device(device)
    own = _node("Server", "127.0.0.1:0", device, 0, host_scheduler=True)
    pipe.send(own.scheduler)
    own.connect()
    tensors = [torch.zeros(WORDS, device=peers.place(device)) for _ in range(4)]

    def answer(batch: list[Any]) -> None:
        for handler, [x], _ in batch:
            try:
                back = torch.bitwise_not(x).add_(own.worker_of(handler))
                own.respond([back], handler, need_event=True)
            except fserver.PeerLostError as error:
                if (error.role, error.rank) != ("worker", 1):
                    raise

    def turn(ch: Any) -> None:
        ch.recv()
        for rank, ([seen], out) in enumerate(zip(ch.tensors, ch.outgoing, strict=True)):
            torch.mul(seen, 2, out=out).add_(rank)
        ch.send()
        _settle(device)
        ch.check()
        if not (batch := own.get_batch(timeout_ms=WAIT_MS)):
            raise TimeoutError("no batch")
        answer(batch)

    for life in range(lives + 1):
        options = {"mode": mode, "name": f"life {life}", "timeout_ms": WAIT_MS}
        ch = own.channel([1], tensors[:2], [1], push=tensors[2:], **options)
        if ch.path != peers.PATHS[mode]:
            bad.append(f"life {life}: goes by {ch.path}")
        if life == lives:
            for _ in range(TURNS):
                turn(ch)
            own.barrier(True, True)  # nobody closes it before all have looked
            ch.close()
            break
        try:
            while True:
                turn(ch)
        except fserver.Error as error:
            ended = error
        lost, end = None, time.monotonic() + peers.LIMIT
        while lost is None and time.monotonic() < end:
            try:
                ch.check()
                time.sleep(0.01)
            except fserver.PeerLostError as error:
                lost = error
        if lost is None or (lost.role, lost.rank) != ("worker", 1):
            bad.append(f"life {life}: {ended!r}, and then the channel says {lost!r}")
        ch.close()
        del ch
        pipe.send("lost")
        while not pipe.poll(0):
            answer(own.get_batch(timeout_ms=20, at_least=1))
        pipe.recv()
    own.stop()
    return bad


def work(
    pipe: Connection,
    scheduler: str,
    device: int | None,
    mode: str,
    rank: int,
    first: int,
    lives: int,
) -> list[str]:
    """Checked exchanges by a channel and by push_pull until the channel ends; then by push_pull
    alone, until all open another one. A worker that comes later begins with that."""
    import torch

    import fserver

    bad = []
    torch.cuda.set_device(device)
    out, back = (torch.zeros(WORDS, device=peers.place(device)) for _ in range(2))
    x, y = (torch.zeros(BYTES, dtype=torch.uint8, device=peers.place(device)) for _ in range(2))
    peers.warm(out)

    def eager(i: int, when: str) -> None:
        v = i % 64
        x.fill_(v)
        y.fill_(peers.POISON)
        w.wait(w.push_pull([x], [0], [y], [0]), timeout_ms=WAIT_MS)
        if wrong := int((y != (255 - v + rank) % 256).sum()):
            bad.append(f"{when}, push_pull {i}: {wrong} bytes are wrong")

    def exchange(ch: Any, i: int, when: str) -> None:
        v = 10 * (i % 1000) + rank
        out.fill_(v)
        back.fill_(peers.POISON)
        ch.send()
        ch.recv()
        _settle(device)
        ch.check()
        if wrong := int((back != 2 * v + rank).sum()):
            bad.append(f"{when}, exchange {i}: {wrong} words are wrong")

    w = _node("Worker", scheduler, device, rank)
    w.connect()
    with w:
        if first:
            for i in range(10):
                eager(i, "at first")
            pipe.send("joined")
            pipe.recv()
        for life in range(first, lives + 1):
            options = {"mode": mode, "name": f"life {life}", "timeout_ms": WAIT_MS}
            ended = None
            with w.channel([out], [1], [back], [1], **options) as ch:
                if ch.path != peers.PATHS[mode]:
                    bad.append(f"life {life}: goes by {ch.path}")
                try:
                    for i in itertools.count() if life < lives else range(TURNS):
                        exchange(ch, i, f"life {life}")
                        eager(i, f"life {life}")
                        if i == 10:
                            pipe.send("running")
                    if life == lives:
                        w.barrier(True, True)
                except fserver.Error as error:
                    ended = f"{type(error).__name__}: {error}"
            if life == lives:
                if ended:
                    bad.append(f"at last: {ended}")
                break
            if not (ended and ended.startswith("ClosedError")):  # the server closes its side
                bad.append(f"life {life}: {ended}")
            for i in range(20):
                eager(i, f"alone after life {life}")
            pipe.send("alone")
            pipe.recv()
    return bad


def _three(gpus: int) -> None:
    if gpus < 2:
        pytest.skip(f"needs two GPUs, this machine has {gpus}")


@pytest.mark.killed_at_work
@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_killed_among_two(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """One of two workers is killed in traffic, twice. The server is told who, the other worker's
    push_pulls go on without it, and with its successor all do, and another channel. The device
    memory of the dead is back."""
    _three(gpus)
    lives = 2
    Process.ready(lives, **peers.FRESH)
    Process.ready(4)
    watch = child(peers.free_memory, 0)
    s = child(serve, 1, mode, lives)
    scheduler, free = s.get(), []
    stays = child(work, scheduler, 0, mode, 0, 0, lives)
    goes = child(work, scheduler, 0, mode, 1, 0, lives, **peers.FRESH)
    for life in range(lives):
        assert (stays.get(), goes.get()) == ("running", "running")
        goes.kill()
        assert (s.get(), stays.get()) == ("lost", "alone")
        watch.put(True)
        free.append(watch.get())
        env = peers.FRESH if life + 1 < lives else {}
        goes = child(work, scheduler, 0, mode, 1, life + 1, lives, **env)
        assert goes.get() == "joined"
        for one in (s, stays, goes):
            one.put(None)
    assert (stays.get(), goes.get()) == ("running", "running")
    assert (stays.get(), goes.get(), s.get()) == ([], [], [])
    watch.put(False)
    assert free[0] - free[1] < 12 << 20


# Of each worker's tensors, in packets and in place: rows and words of a row.
PUSH = [[(64, 256), (300, 512)], [(33, 1000), (129, 1024)]]
PULL = [[(17, 100), (90, 2000)], [(200, 700), (5, 3)]]


def _rows(turn: int, back: bool, rank: int) -> list[int]:
    """How many of each tensor's are sent."""
    shapes = (PULL if back else PUSH)[rank]
    which = [(turn + back + 2 * rank + 3 * j) % 6 for j in range(len(shapes))]
    return [(n, 0, 1, n // 2, n - 1, n)[i] for (n, _), i in zip(shapes, which, strict=True)]


def _value(turn: int, back: bool, rank: int, j: int) -> int:
    return 1000 * (turn + 1) + 100 * back + 10 * rank + j


def _zeros(shapes: list[tuple[int, int]], device: int | None) -> list[Any]:
    import torch

    return [torch.zeros(*s, dtype=torch.int32, device=peers.place(device)) for s in shapes]


def _came(ch: Any, turn: int, back: bool, peer: int, rank: int) -> list[str]:
    """What is wrong in what a peer has sent in a turn; poisons it."""
    bad = []
    want = _rows(turn, back, rank)
    if ch.rows[peer].tolist() != want:
        bad.append(f"turn {turn}, worker {rank}: {ch.rows[peer].tolist()} rows, want {want}")
    for j, (t, n) in enumerate(zip(ch.tensors[peer], want, strict=True)):
        if wrong := int((t[:n] != _value(turn, back, rank, j)).sum()):
            bad.append(f"turn {turn}, worker {rank}, tensor {j}: {wrong} words are wrong")
        t.fill_(peers.POISON)
    return bad


def serve_rows(pipe: Connection, device: int | None, mode: str, turns: int) -> list[str]:
    import torch

    bad = []
    torch.cuda.set_device(device)
    own = _node("Server", "127.0.0.1:0", device, 0, host_scheduler=True)
    pipe.send(own.scheduler)
    own.connect()
    push = [t for shapes in PUSH for t in _zeros(shapes, device)]
    pull = [_zeros(shapes, device) for shapes in PULL]
    options = {"mode": mode, "name": "rows", "timeout_ms": WAIT_MS}
    with own.channel([0, 1], [*pull[0], *pull[1]], [5, 6], push=push, **options) as ch:
        if ch.path != peers.PATHS[mode]:
            bad.append(f"goes by {ch.path}")
        for turn in range(turns):
            ch.recv()
            _settle(device)
            ch.check()
            for rank in range(2):
                bad += _came(ch, turn, False, rank, rank)
                for j, t in enumerate(pull[rank]):
                    t.fill_(_value(turn, True, rank, j))
            ch.send(rows=[*_rows(turn, True, 0), *_rows(turn, True, 1)])
        _settle(device)
        ch.check()
        own.barrier(True, True)  # nobody closes it before all have looked
    own.stop()
    return bad


def work_rows(
    pipe: Connection, scheduler: str, device: int | None, mode: str, rank: int, turns: int
) -> list[str]:
    import torch

    bad = []
    torch.cuda.set_device(device)
    push, pull = _zeros(PUSH[rank], device), _zeros(PULL[rank], device)
    options = {"mode": mode, "name": "rows", "timeout_ms": WAIT_MS}
    w = _node("Worker", scheduler, device, rank)
    w.connect()
    with w, w.channel(push, [0, 1], pull, [5, 6], **options) as ch:
        if ch.path != peers.PATHS[mode]:
            bad.append(f"goes by {ch.path}")
        for turn in range(turns):
            for j, t in enumerate(push):
                t.fill_(_value(turn, False, rank, j))
            ch.send(rows=_rows(turn, False, rank))
            ch.recv()
            _settle(device)
            ch.check()
            bad += _came(ch, turn, True, 0, rank)
        w.barrier(True, True)
    return bad


@pytest.mark.parametrize("mode", ["kernel", "copy", "host"])
def test_rows_of_two(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """Workers whose tensors have other shapes, and other row counts in each message."""
    _three(gpus)
    Process.ready(3)
    s = child(serve_rows, 1, mode, 24)
    scheduler = s.get()
    workers = [child(work_rows, scheduler, 0, mode, rank, 24) for rank in range(2)]
    assert [one.get() for one in (*workers, s)] == [[], [], []]


def serve_last(pipe: Connection, device: int | None, mode: str) -> list[str]:
    """Waits for both workers. One has closed its side long before the other sends."""
    import torch

    bad = []
    torch.cuda.set_device(device)
    own = _node("Server", "127.0.0.1:0", device, 0, host_scheduler=True)
    pipe.send(own.scheduler)
    own.connect()
    into = [torch.zeros(64, device=peers.place(device)) for _ in range(2)]
    with own.channel([1], [], [], push=into, mode=mode, timeout_ms=WAIT_MS) as ch:
        ch.recv()
        _settle(device)
        if (came := [t.tolist() for t in into]) != [[1.0] * 64, [2.0] * 64]:
            bad.append(f"{came} came")
        if ch.path != "host" and ch._side.status() != (0, 0):
            bad.append(f"the channel ended: {ch._side.status()}")
    own.barrier(True, True)
    own.stop()
    return bad


def work_last(
    pipe: Connection, scheduler: str, device: int | None, mode: str, rank: int
) -> list[str]:
    import torch

    torch.cuda.set_device(device)
    x = torch.full((64,), rank + 1.0, device=peers.place(device))
    w = _node("Worker", scheduler, device, rank)
    w.connect()
    with w:
        with w.channel([x], [1], [], [], mode=mode, timeout_ms=WAIT_MS) as ch:
            time.sleep(rank)
            ch.send()
            _settle(device)
        w.barrier(True, True)
    return []


@pytest.mark.parametrize("mode", ["kernel", "copy", "host"])
def test_closed_by_one_of_two(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """A worker that has sent its last message and closes its side ends no wait for the other."""
    _three(gpus)
    Process.ready(3)
    s = child(serve_last, 1, mode)
    scheduler = s.get()
    workers = [child(work_last, scheduler, 0, mode, rank) for rank in range(2)]
    assert [one.get() for one in (*workers, s)] == [[], [], []]
