"""The device's part of stream channels, without an engine: two processes tell each other what
they have through a pipe."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from pair import Pair, Side, at_once, say

KIB, MIB = 1 << 10, 1 << 20

SIZES = [
    4096, 1, 7, 8, 9, 15, 16, 17, 255, 4095, 4097, 64 * KIB, 256 * KIB - 1, 256 * KIB,
    256 * KIB + 1, 256 * KIB + 16, 896 * KIB, 1792 * KIB, 2 * MIB + 4, 8 * MIB + 3, 64 * MIB, 0,
]  # fmt: skip
MODES = ["kernel", "copy"]


def _pattern(size: int, seed: int, device: str) -> Any:
    import torch

    i = torch.arange(size, dtype=torch.int64, device=device)
    return ((i * 131 + (i >> 8) * 17 + seed * 29) & 255).to(torch.uint8)


def _check(got: Any, want: Any, what: str) -> None:
    import torch

    if not torch.equal(got, want):
        wrong = (got != want).nonzero().flatten()
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} bytes differ, first at {wrong[:4].tolist()}, "
            f"last at {wrong[-1].item()}: {got[wrong[:4]].tolist()} for {want[wrong[:4]].tolist()}"
        )


def exchange_sizes(side: Side, mode: str, sizes: list[int], shift: int) -> int:
    """Echo of each size, three times, into poisoned memory; the answer is another pattern."""
    import torch

    device = f"cuda:{side.device}"
    for size in sizes:
        room = torch.empty(size + 64, dtype=torch.uint8, device=device)
        back = torch.empty(size + 64, dtype=torch.uint8, device=device)
        back.fill_(0xA5)
        torch.cuda.synchronize()
        mine, other = room[shift : shift + size], back[2 * shift : 2 * shift + size]
        channel = side.open([mine], [other], mode)
        say(side.index, f"{mode} {size} bytes")
        for turn in range(3):
            what = f"{mode}, {size} bytes shifted by {shift}, exchange {turn}, side {side.index}"
            mine.copy_(_pattern(size, 2 * turn + side.index, device))
            if side.index == 0:
                channel.send()
            channel.recv()
            torch.cuda.synchronize()
            assert channel.status() == (0, 0), f"{what}: status {channel.status()}"
            _check(other, _pattern(size, 2 * turn + 1 - side.index, device), what)
            edges = torch.cat([back[: 2 * shift], back[2 * shift + size :]])
            assert bool((edges == 0xA5).all()), f"{what}: bytes beside the tensor were written"
            rows = channel.rows()[0].tolist()
            assert rows == [size], f"{what}: rows are {rows}"
            # Before the send: after it, the memory is the peer's until recv.
            back.fill_(0xA5)
            if side.index == 1:
                channel.send()
        torch.cuda.synchronize()
        side.barrier()
        channel.close()
        side.channels.clear()
        side.barrier()
    return len(sizes)


@pytest.mark.parametrize("mode", MODES)
def test_sizes(pair: Pair, mode: str) -> None:
    assert pair.run(exchange_sizes, mode=mode, sizes=SIZES, shift=0) == [len(SIZES)] * 2


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_unaligned(pair: Pair, shift: int) -> None:
    sizes = [1, 100, 4096, 300 * KIB + 5]
    assert pair.run(exchange_sizes, mode="kernel", sizes=sizes, shift=shift) == [4, 4]


def exchange_many(side: Side, mode: str, n: int) -> None:
    """n tensors in one call, of many sizes, more than one launch takes."""
    import torch

    device = f"cuda:{side.device}"
    sizes = [(i * 7919) % 5000 if i % 5 else 300 * KIB + i for i in range(n)]
    out = [torch.empty(s, dtype=torch.uint8, device=device) for s in sizes]
    into = [torch.empty(s, dtype=torch.uint8, device=device) for s in sizes]
    channel = side.open(out, into, mode)
    for turn in range(3):
        for i, t in enumerate(out):
            t.copy_(_pattern(sizes[i], i + turn + 100 * side.index, device))
        if side.index == 0:
            channel.send()
        channel.recv()
        torch.cuda.synchronize()
        assert channel.status() == (0, 0)
        for i, r in enumerate(into):
            want = _pattern(sizes[i], i + turn + 100 * (1 - side.index), device)
            _check(r, want, f"tensor {i} of exchange {turn}")
            r.fill_(0xA5)
        if side.index == 1:
            channel.send()
    torch.cuda.synchronize()
    side.barrier()
    channel.close()
    side.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_many_tensors(pair: Pair, mode: str) -> None:
    pair.run(exchange_many, mode=mode, n=40)


def one_way(side: Side, mode: str, size: int, count: int) -> None:
    """Only side 0 sends, as fast as it can: credits keep it from overwriting."""
    import torch

    device = f"cuda:{side.device}"
    t = torch.zeros(size, dtype=torch.int32, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    channel = side.open([t], [], mode) if side.index == 0 else side.open([], [t], mode)
    for i in range(1, count + 1):
        if side.index == 0:
            t.fill_(i)
            channel.send()
        else:
            channel.recv()
            wrong += (t != i).sum()
    torch.cuda.synchronize()
    assert channel.status() == (0, 0)
    assert wrong.item() == 0, f"{wrong.item()} wrong words in {count} messages of {4 * size} bytes"
    side.barrier()
    channel.close()
    side.barrier()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 1024, 100_000])
def test_one_way(pair: Pair, mode: str, size: int) -> None:
    pair.run(one_way, mode=mode, size=size, count=300)


def one_way_rows(side: Side, sizes: list[int], shared: bool, count: int) -> None:
    """Of every second message side 0 sends fewer rows. What cannot be shared, as the memory of
    some allocators, lands first. The blocks of the two sides share such a message out differently,
    and so packets in launches of other segments."""
    import torch

    from fserver.channel.plan import Plan

    device = f"cuda:{side.device}"
    tensors = [torch.zeros(n // 4, dtype=torch.int32, device=device) for n in sizes]
    parts = [[len(t) // (1 + i * (1 + j)) for j, t in enumerate(tensors)] for i in range(2)]
    rows = torch.tensor(parts, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    out, into = (tensors, []) if side.index == 0 else ([], tensors)
    share = Plan._share if shared else lambda plan, piece: None
    with mock.patch.object(Plan, "_share", share):
        channel = side.open(out, into, "kernel")
    for i in range(1, count + 1):
        if side.index == 0:
            for t in tensors:
                t.fill_(i)
            channel.send(parts[i % 2])
        else:
            channel.recv()
            for t, n in zip(tensors, parts[i % 2], strict=True):
                wrong += (t[:n] != i).sum()
            wrong += (channel.rows()[0] != rows[i % 2]).sum()
    torch.cuda.synchronize()
    assert channel.status() == (0, 0)
    assert wrong.item() == 0, f"{wrong.item()} wrong words in {count} messages of {sizes} bytes"
    side.barrier()
    channel.close()
    side.barrier()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "sizes", [[4 * MIB], [4 * MIB, 200 * KIB, 200 * KIB, MIB, 200 * KIB]], ids=repr
)
def test_one_way_rows(pair: Pair, sizes: list[int], shared: bool) -> None:
    # On one GPU the processes take turns, for milliseconds each. compute-sanitizer slows them too.
    count = 300 if len(set(pair.devices)) == 2 else 100
    pair.run(one_way_rows, sizes=sizes, shared=shared, count=count)


def short_rows(side: Side, mode: str, width: int) -> None:
    import torch

    device = f"cuda:{side.device}"
    t = torch.zeros(64, width, dtype=torch.float32, device=device)
    r = torch.zeros(64, width, dtype=torch.float32, device=device)
    channel = side.open([t], [r], mode)
    for turn, (there, back) in enumerate([(64, 64), (3, 50), (0, 1), (64, 0), (17, 64)]):
        n, expected = (there, back) if side.index == 0 else (back, there)
        t.fill_(100 * turn + side.index)
        if side.index == 0:
            channel.send(rows=[n])
        channel.recv()
        torch.cuda.synchronize()
        assert channel.status() == (0, 0)
        assert channel.rows()[0].tolist() == [expected]
        assert bool((r[:expected] == 100 * turn + 1 - side.index).all())
        r.fill_(-1)
        if side.index == 1:
            channel.send([n])
    torch.cuda.synchronize()
    side.barrier()
    with pytest.raises(Exception, match=r"rows\[0\] is 65, but the tensor has 64: give"):
        if side.index:
            channel.recv()
        channel.send([65])
    side.barrier()
    channel.close()
    side.barrier()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [4, 2048])
def test_rows(pair: Pair, mode: str, width: int) -> None:
    pair.run(short_rows, mode=mode, width=width)


def replay(side: Side, mode: str, size: int, inner: int, replays: int, stages: int) -> float:
    """A graph of `inner` x `stages` exchanges, replayed. Each message is the one before plus
    one, so that a stale or torn one is seen, also by every later one."""
    import torch

    device = f"cuda:{side.device}"
    tensors = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(stages)]
    results = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(stages)]
    expected = torch.zeros((), dtype=torch.int32, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    channels = [side.open([t], [r], mode) for t, r in zip(tensors, results, strict=True)]

    def layer() -> None:
        expected.add_(1)
        if side.index == 0:
            for c, t in zip(channels, tensors, strict=True):
                t.copy_(expected.expand(size))
                c.send()
            for c, r in zip(channels, results, strict=True):
                c.recv()
                wrong.add_((r != expected * 3).sum())
        else:
            for c, t, r in zip(channels, tensors, results, strict=True):
                c.recv()
                wrong.add_((r != expected).sum())
                torch.mul(r, 3, out=t)
                c.send()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer()
        stream.synchronize()
        side.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(inner):
                layer()
        side.barrier()
        started = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        stream.synchronize()
        took = time.perf_counter() - started
    for c in channels:
        assert c.status() == (0, 0), f"status {c.status()}"
    assert expected.item() == 3 + inner * replays
    assert wrong.item() == 0, f"{wrong.item()} wrong words"
    side.barrier()
    del graph
    for c in channels:
        c.close()
    side.barrier()
    return took


@pytest.mark.parametrize("mode", MODES)
def test_replay(pair: Pair, mode: str) -> None:
    """10^5 checked exchanges where the processes need not take turns."""
    replays = 1000 if at_once(pair.devices) else 1
    pair.run(replay, 30, mode=mode, size=1024, inner=100, replays=replays, stages=1)


@pytest.mark.parametrize("mode", MODES)
def test_layers(pair: Pair, mode: str) -> None:
    """61 layers of 3 micro-batches in one graph on each side."""
    replays = 1000 if at_once(pair.devices) else 1
    pair.run(replay, 30, mode=mode, size=16 * 1024, inner=61, replays=replays, stages=3)


def large_replay(side: Side, mode: str) -> None:
    replay(side, mode, 448 * KIB, 20, 20, 1)


@pytest.mark.parametrize("mode", MODES)
def test_large_replay(pair: Pair, mode: str) -> None:
    pair.run(large_replay, mode=mode)


def wait_in_vain(side: Side, mode: str, how: str) -> tuple[float, tuple[int, int], int]:
    """Side 0 waits for an answer that does not come; its stream ends, and all goes on."""
    import torch

    device = f"cuda:{side.device}"
    before = torch.cuda.mem_get_info()[0]
    t = torch.ones(4096, device=device)
    r = torch.zeros(4096, device=device)
    timeout = 500 if how == "late" else 60000
    channel = side.open([t], [r], mode, timeout_ms=timeout)
    if side.index == 1:
        side.exchange(os.getpid())
        if how == "killed":
            os.kill(os.getpid(), 9)
        return 0.0, (0, 0), 0
    side.exchange(None)
    channel.send()
    channel.recv()
    if how != "late":
        timer = threading.Timer(0.5, channel.abort)  # the engine does this when a peer is lost
        timer.start()
    started = time.perf_counter()
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    status = channel.status()
    with pytest.raises(Exception, match="the channel has ended"):
        channel.send()
    channel.close()
    side.channels.clear()
    assert torch.ones(1000, device=device).sum().item() == 1000  # the context is as it was
    return took, status, before - torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("kernel", "late"),
        ("kernel", "abort"),
        ("kernel", "killed"),
        ("copy", "late"),
        ("copy", "killed"),
    ],
)
def test_ends(fresh: Pair, mode: str, how: str) -> None:
    for index in (0, 1):
        fresh.start(index, wait_in_vain, mode=mode, how=how)
    took, status, lost = fresh.result(0)
    assert took < 5
    assert status == ((2, 0) if how == "late" else (1, 0) if mode == "kernel" else (1, -1))
    if fresh.devices[0] != fresh.devices[1]:
        assert lost <= 32 * MIB, f"{lost} bytes of the GPU were not given back"


def many_in_vain(
    side: Side, count: int, then: str
) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Side 0 waits on many streams at once, more than CUDA has queues for. then: what else there
    is, or what it does meanwhile. The second result: bytes of the GPU that are taken when the
    waits have ended, and when all channels are closed."""
    import torch

    device = f"cuda:{side.device}"
    filled, some = [], torch.zeros(16 * MIB, device=device).add_(1)
    channels = []
    for _ in range(count):
        t, r = torch.ones(4096, device=device), torch.zeros(4096, device=device)
        channels.append(side.open([t], [r], "copy", timeout_ms=300))
    before = torch.cuda.mem_get_info()[0]

    def taken() -> int:
        torch.cuda.empty_cache()
        return before - torch.cuda.mem_get_info()[0]

    if side.index == 0:
        streams = [torch.cuda.Stream() for _ in channels]
        if then == "full":  # no memory for another context
            free = before - 128 * MIB
            filled.append(torch.empty(free, dtype=torch.uint8, device=device))
        for call in ("send", "recv"):
            for channel, stream in zip(channels, streams, strict=True):
                with torch.cuda.stream(stream):
                    getattr(channel, call)()
        if then == "load":
            torch.erfinv(some)  # the first launch of this kernel
        elif then == "free":
            del some
            torch.cuda.empty_cache()
        elif then == "capture":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.capture_begin(capture_error_mode="global")
                some.add_(1)
                time.sleep(1)
                graph.capture_end()
        torch.cuda.synchronize()
        filled.clear()
    ended = taken()
    side.barrier()
    found = [channel.status() for channel in channels]
    for channel in channels:
        channel.close()
    side.channels.clear()
    return found, (ended, taken())


@pytest.mark.parametrize(
    ("queues", "count", "then"),
    [
        ("1", 3, ""),
        ("2", 8, ""),
        ("8", 32, ""),
        ("1", 3, "full"),
        ("1", 3, "capture"),
        ("1", 3, "free"),
        ("2", 8, "free"),
        ("1", 3, "load"),
        ("8", 1, "load"),
        ("8", 32, "load"),
    ],
)
def test_many_end(made: Callable[..., Pair], queues: str, count: int, then: str) -> None:
    """What ends a wait of mode "copy" is not behind other waits, nor kept by a thread for which the
    driver waits for all of them."""
    pair = made((0, 0), {"CUDA_DEVICE_MAX_CONNECTIONS": queues})
    found, (ended, closed) = pair.run(many_in_vain, 30, count=count, then=then)[0]
    assert found == [(2, 0)] * count
    if queues == "1":  # another context has ended the waits, where there was memory for it
        assert (ended > 128 * MIB) == (then != "full"), f"{ended} bytes of the GPU were taken"
    assert closed < 128 * MIB, f"{closed} bytes of the GPU were not given back"


def one_way_in_vain(side: Side, mode: str, late: int) -> tuple[float, tuple[int, int]]:
    """Side 0 only sends, side 1 only receives, and one of them comes when the other has given up:
    the receiver has waited for data, or the sender for credits."""
    import torch

    device = f"cuda:{side.device}"
    t = torch.ones(4096, device=device)
    tensors: Any = ([t], []) if side.index == 0 else ([], [t])
    channel = side.open(*tensors, mode, timeout_ms=500)
    if side.index == late:
        side.barrier()
    started = time.perf_counter()
    for _ in range(1 if side.index == late or late == 0 else 4):
        channel.send() if side.index == 0 else channel.recv()
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    status = channel.status()
    if side.index != late:
        with pytest.raises(Exception, match="the channel has ended"):
            channel.send() if side.index == 0 else channel.recv()
        side.barrier()
    side.barrier()
    channel.close()
    side.channels.clear()
    return took, status


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late", [0, 1])
def test_one_way_ends(pair: Pair, mode: str, late: int) -> None:
    """Who waits does so as long as the channel says; who is late is not held up."""
    results = pair.run(one_way_in_vain, mode=mode, late=late)
    took, status = results[1 - late]
    assert 0.4 < took < 5
    assert status == (2, 0)
    assert results[late][0] < 5


def replayed_after_close(side: Side, mode: str, size: int) -> None:
    """Both sides have ended when side 0 replays its graph. The replay ends, and its kernels leave
    the memory of the peer as it is."""
    import torch

    device = f"cuda:{side.device}"
    t = torch.zeros(size // 4, dtype=torch.int32, device=device)
    r = torch.zeros(size // 4, dtype=torch.int32, device=device)
    channel = side.open([t], [r], mode, timeout_ms=2000)
    calls = (channel.send, channel.recv)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            t.add_(1)
            for call in calls if side.index == 0 else reversed(calls):
                call()
        for _ in range(3):
            graph.replay()
        stream.synchronize()
        assert channel.status() == (0, 0)
        assert bool((r == 3).all())
        side.barrier()
        rows = channel.rows()[0]
        channel.end()
        side.barrier()
        r.fill_(7)
        stream.synchronize()
        side.barrier()
        if side.index == 0:
            started = time.monotonic()
            for _ in range(3):
                graph.replay()
            stream.synchronize()
            assert time.monotonic() - started < 1
        side.barrier()
        assert bool((r == 7).all()) or mode == "copy"
        assert rows.tolist() == [size // 4]
    del calls, rows
    assert not channel.close()
    del graph
    gc.collect()
    end = time.monotonic() + 5
    while not channel.close():
        assert time.monotonic() < end, "the graph is not gone"
        time.sleep(0.001)
    side.barrier()
    side.channels.clear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [4 * KIB, 200 * KIB, 4 * MIB])
def test_replayed_after_close(pair: Pair, mode: str, size: int) -> None:
    pair.run(replayed_after_close, mode=mode, size=size)


def sends_no_more(side: Side, size: int) -> None:
    """Side 1 takes longer for the first answer than side 0 waits. The message that side 0 has
    enqueued behind that wait, in a graph, does not come."""
    import torch

    device = f"cuda:{side.device}"
    t = torch.zeros(size // 4, dtype=torch.int32, device=device)
    r = torch.zeros(size // 4, dtype=torch.int32, device=device)
    channel = side.open([t], [r], "kernel", timeout_ms=300 if side.index == 0 else 1500)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if side.index == 0:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for _ in range(2):
                    t.add_(1)
                    channel.send()
                    channel.recv()
            graph.replay()
            stream.synchronize()
            assert channel.status() == (2, 0)
            side.barrier()
        else:
            channel.recv()
            stream.synchronize()
            assert bool((r == 1).all())
            side.barrier()
            channel.send()
            channel.recv()
            stream.synchronize()
            assert channel.status() == (2, 0)
            if size < 16 * MIB:
                assert bool((r == 1).all())
    side.barrier()
    channel.close()
    side.channels.clear()
    side.barrier()


@pytest.mark.parametrize("size", [4096, 1 * MIB, 20 * MIB])
def test_sends_no_more(pair: Pair, size: int) -> None:
    pair.run(sends_no_more, size=size)


def slow_sender(side: Side, mode: str) -> None:
    """One way, by a sender who takes most of the time that the receiver waits."""
    import torch

    t = torch.zeros(4096, dtype=torch.int32, device=f"cuda:{side.device}")
    tensors: Any = ([t], []) if side.index == 0 else ([], [t])
    channel = side.open(*tensors, mode, timeout_ms=1000)
    for i in range(1, 4):
        if side.index == 0:
            time.sleep(0.6)
            t.fill_(i)
            channel.send()
        else:
            channel.recv()
            torch.cuda.synchronize()
            assert bool((t == i).all()), f"message {i}"
    torch.cuda.synchronize()
    assert channel.status() == (0, 0)
    side.barrier()
    channel.close()
    side.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_slow_sender(pair: Pair, mode: str) -> None:
    pair.run(slow_sender, mode=mode)
