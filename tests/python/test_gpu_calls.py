"""push_pull, respond and flags over a driver without a GPU: no call of the driver keeps other
Python threads from running, or spoils a capture, and what streams wait for stays."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import lanes
import pytest
import torch
from forked import Forks
from lanes import DRIVER, over, refuses, released, run_check
from nodes import LIMIT, eventually, in_thread, open_cluster

import fserver
from fserver import _loader

# What follows, up to the tests, runs in a child.


def on_gpu(n: int, value: float = 0) -> torch.Tensor:
    """A tensor of the first GPU, and of the host."""
    return fserver.map_pinned_tensor(torch.full((n,), value), 0)


def word(value: int = 0) -> torch.Tensor:
    return fserver.map_pinned_tensor(torch.tensor([value]), 0)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor of the fake GPU holds."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    ctypes.memmove(out.data_ptr(), tensor.data_ptr(), out.nbytes)
    return out


def push_pull_behind_a_full_stream() -> None:
    cluster = open_cluster(backend="GPU")
    worker, server = cluster.worker, cluster.server
    x, y, z = on_gpu(1000, 3), on_gpu(1000), on_gpu(1000, 7)

    def round_trip(answer: Callable[[torch.Tensor, int], None]) -> None:
        handles: list[int] = []
        released(lambda: handles.append(worker.push_pull([x], [1], [y], [2])))
        [(handler, [got], keys)] = server.get_batch(1e3 * LIMIT)
        assert keys == [1]
        assert on_host(got).eq(3).all()
        released(lambda: answer(got, handler))
        worker.wait(handles[0], 1e3 * LIMIT)
        assert on_host(y).eq(7).all()

    round_trip(lambda got, handler: server.respond([z], handler, need_event=True))
    round_trip(lambda got, handler: server.respond_vec(z, [[got]], [handler]))
    round_trip(lambda got, handler: server.respond([z], handler, need_event=True))
    assert DRIVER.events >= 6
    # Tensors of the CPU, on a node that has a GPU.
    a, b = torch.ones(10), torch.zeros(10)
    h = worker.push_pull([a], [3], [b], [4])
    [(handler, [got], _)] = server.get_batch(1e3 * LIMIT)
    server.respond([on_host(got) * 2], handler)
    worker.wait(h, 1e3 * LIMIT)
    assert b.eq(2).all()
    # The stream has work, and may fill pinned memory: they wait for a word of it.
    DRIVER.busy = 1
    before = DRIVER.asked, DRIVER.words
    h = worker.push_pull([a], [3], [b], [4])
    assert DRIVER.asked > before[0] and DRIVER.words > before[1]
    [(handler, _, _)] = server.get_batch(1e3 * LIMIT)
    before = DRIVER.asked, DRIVER.words
    server.respond([a], handler)
    assert DRIVER.asked > before[0] and DRIVER.words > before[1]
    worker.wait(h, 1e3 * LIMIT)
    asked = DRIVER.asked
    worker.push_pull([a], [3], [], [], need_event=False)
    assert DRIVER.asked == asked
    server.get_batch(1e3 * LIMIT)
    DRIVER.busy = 0
    # A stream that is captured is refused, and nothing is sent.
    DRIVER.capturing = 1
    text = "^push_pull: the current stream of cuda:0 is being captured into a CUDA graph"
    refuses(lambda: worker.push_pull([x], [1], [y], [2]), fserver.ConfigError, text)
    assert server.get_batch(50) == []
    # Tensors of the CPU do not wait for it, and it is not queried, which would spoil the capture.
    asked = DRIVER.asked
    worker.push_pull([a], [9], [], [])
    assert DRIVER.asked == asked
    DRIVER.capturing = 0
    assert len(server.get_batch(1e3 * LIMIT)) == 1
    cluster.worker._node.describe()
    cluster.close()


def calls_beside_a_full_stream() -> None:
    """Other calls than the one whose event waits are made meanwhile, from other threads."""
    cluster = open_cluster(backend="GPU")
    worker, server = cluster.worker, cluster.server
    x, y = on_gpu(1000, 3), on_gpu(1000)
    for _ in range(2):  # there is an event to take, and then there is none
        DRIVER.waits = 1
        pushed = in_thread(worker.push_pull, [x], [1], [y], [2])
        eventually(lambda: DRIVER.waiting == 1)
        a, b = torch.ones(10), torch.zeros(10)
        h = worker.push_pull([a], [3], [b], [4])  # its event needs no stream
        [(handler, [got], _)] = server.get_batch(1e3 * LIMIT)
        server.respond([got], handler, need_event=False)
        worker.wait(h, 1e3 * LIMIT)
        second = in_thread(worker.push_pull, [on_gpu(10)], [5], [on_gpu(10)], [6])
        eventually(lambda: DRIVER.waiting == 2)  # no lock keeps it
        DRIVER.waits = 0
        for future in (pushed, second):
            future.result(LIMIT)
        for _ in range(2):
            [(handler, [got], _)] = server.get_batch(1e3 * LIMIT)
            server.respond([got], handler)
        for future in (pushed, second):
            worker.wait(future.result(LIMIT), 1e3 * LIMIT)
    cluster.close()


class Watch:
    """Whether the memory of a tensor is still there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._weak = tensor.untyped_storage()._weak_ref()

    @property
    def alive(self) -> bool:
        return not torch.UntypedStorage._expired(self._weak)


def references() -> None:
    """Of flags: until the stream has passed."""
    seq = word()
    for call in (
        lambda flag: fserver.wait_flag(flag, seq),
        lambda flag: fserver.write_flag(flag, seq),
        lambda flag: fserver.seq_add_one(flag),
        lambda flag: _loader.load().wait_value(flag, 0),
    ):
        flag = word()
        memory = Watch(flag)
        DRIVER.unpassed = 1
        call(flag)
        del flag
        gc.collect()
        time.sleep(0.1)
        assert memory.alive
        DRIVER.unpassed = 0
        eventually(lambda memory=memory: not memory.alive)


def references_of_a_graph() -> None:
    """As long as the graph."""
    flag, seq = word(), word()
    memory = Watch(flag)
    DRIVER.capturing = 1
    fserver.wait_flag(flag, seq)
    DRIVER.capturing = 0
    del flag
    gc.collect()
    assert DRIVER.events == 0  # none in a stream that is captured
    assert DRIVER.retains == 1
    assert memory.alive
    ctypes.CDLL("libcuda.so.1").drop_graph()
    eventually(lambda: not memory.alive)


def beside_a_capture() -> None:
    """Flags, in another thread than the one that captures."""
    DRIVER.captures = 1
    flag, seq = word(), word()
    fserver.write_flag(flag, seq)
    fserver.wait_flag(flag, seq)
    fserver.seq_add_one(seq)
    _loader.load().wait_value(flag, 0)
    del flag, seq
    time.sleep(0.1)  # the thread that lets go of them
    mark = _loader.load().Mark(0)
    assert mark.passed()
    nothing = _loader.load().HostCall(mark, 0, "send")
    nothing.run(None)
    DRIVER.current_stream = 4
    nothing.run(None)
    mark.passed()
    del mark, nothing
    _loader.load().settle(0)
    _loader.load().synchronize(0)
    w, s = lanes.pair("copy")
    lanes.exchange(w, s, 1)
    DRIVER.current_stream = 2  # has the lanes ask the stream before
    lanes.exchange(w, s, 2)
    w.lane.pending()
    DRIVER.busy = 1
    refuses(lambda: (setattr(DRIVER, "current_stream", 3), w.lane.send()), fserver.ConfigError, "")
    DRIVER.busy = 0
    for side in (w, s):
        side.lane.close()
    assert DRIVER.spoiled == 0


def page() -> Any:
    """What a wait looks at: ended, before, late; and what the newest was given."""
    return (ctypes.c_uint64 * 3).from_address(DRIVER.wait_page)


def ends() -> None:
    """A wait ends by what its kernel looks at."""
    flag, seq = word(), word()
    fserver.wait_flag(flag, seq)
    assert (DRIVER.wait_since, DRIVER.wait_patience) == (0, 0)
    look = page()
    assert list(look) == [0, 0, 0]
    fserver.wait_flag(flag, seq, timeout_ms=50)
    assert DRIVER.wait_patience == 50_000_000
    refuses(lambda: fserver.wait_flag(flag, seq, timeout_ms=-1), fserver.ConfigError, "timeout_ms")
    look[2] = 1  # as the kernel says it
    text = "^wait_flag: an earlier wait_flag lasted longer than its timeout_ms"
    refuses(lambda: fserver.wait_flag(flag, seq), fserver.TimeoutError, text)
    fserver.wait_flag(flag, seq)

    first = open_cluster()
    assert list(look) == [0, 0, 0]
    second = open_cluster()
    second.close()
    assert list(look) == [0, 0, 0]  # there are other nodes
    first.close()
    assert list(look) == [1, 0, 0]  # all that wait go on
    start = time.monotonic()
    fserver.wait_flag(flag, seq)
    assert time.monotonic() - start < 5
    assert list(look) == [1, 1, 0]
    assert DRIVER.wait_since == 1
    DRIVER.capturing = 1
    fserver.wait_flag(flag, seq)
    DRIVER.capturing = 0
    assert DRIVER.wait_since == 2**64 - 1  # a graph looks at `before`


def ends_with_the_interpreter() -> None:
    looks: list[Any] = []

    def ended() -> None:
        if looks[0][0] != 2**64 - 2:
            os._exit(1)

    atexit.register(ended)  # before the extension, so it runs behind that
    flag, seq = word(), word()
    fserver.wait_flag(flag, seq)
    looks.append(page())
    DRIVER.unpassed = 1
    fserver.wait_flag(flag, seq)  # its references stay


# The tests.


@pytest.mark.parametrize(
    "check",
    [
        push_pull_behind_a_full_stream,
        calls_beside_a_full_stream,
        references,
        references_of_a_graph,
        beside_a_capture,
        ends,
        ends_with_the_interpreter,
    ],
)
def test_calls(driver: Forks, check: Callable[[], None]) -> None:  # noqa: F811
    over(driver, check, finalize=check is ends_with_the_interpreter)


if __name__ == "__main__":
    run_check(globals())
