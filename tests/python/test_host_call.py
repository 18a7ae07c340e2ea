"""What a call of a channel enqueues whose messages the engine carries, over a driver without a
GPU."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import test_gpu_calls as calls
import torch
from forked import Forks
from lanes import DRIVER, over, refuses, released, run_check
from test_gpu_calls import on_host, page, word

import fserver
from fserver import _loader

STREAM, GRAPH, ELSEWHERE = 0, 1, 2  # what run() returns


# What follows, up to the tests, runs in a child.


def floats(n: int, value: float = 0) -> torch.Tensor:
    return calls.on_gpu(n, float(value))


class Call:
    """One with what it counts in."""

    def __init__(self, mark: Any = None) -> None:
        self.mark = mark or _loader.load().Mark(0)
        self.made = _loader.load().HostCall(self.mark, 0, "send")
        self.count, self.flag, self.asked, self.done = (word() for _ in range(4))

    def rings(self, last: bool = True) -> Call:
        self.made.ring(self.count, self.flag, last)
        return self

    def waits(self, add: int = 1) -> Call:
        self.made.wait(self.count, add, self.asked, self.done)
        return self

    def copies(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Call:
        for to, what in pairs:
            self.made.copy(to, what)
        return self

    def run(self, sizes: list[int] | None = None) -> tuple[int, int, int]:
        """Launches, copies by the copy engine, and copies by kernels."""
        before = DRIVER.launches, DRIVER.copies, DRIVER.small_copies
        assert self.made.run(sizes) == STREAM
        now = DRIVER.launches, DRIVER.copies, DRIVER.small_copies
        return tuple(b - a for a, b in zip(before, now, strict=True))  # type: ignore[return-value]


def value(of: torch.Tensor) -> int:
    return int(on_host(of))


def small_copies() -> None:
    """A kernel makes small ones, and copy engines all others."""
    few = [(floats(10), floats(10, i)) for i in range(9)]
    one, odd = (floats(1), floats(1)), (floats(11)[1:], floats(10))  # not at a multiple of 16
    most, large = (floats(2048), floats(2048, 2)), (floats(3000), floats(3000))
    for pairs, by_kernel in (
        (few, 9),
        ([*few, one], 9),  # a kernel takes no more
        ([most], 1),
        ([one, most], 2),
        ([one, large], 1),
        ([odd, one], 1),
    ):
        for kind in (Call().rings(), Call().waits()):
            done = kind.copies(*pairs).run()
            assert done == (1, len(pairs) - by_kernel, by_kernel)
            assert all(on_host(to).eq(on_host(what)).all() for to, what in pairs)
    assert Call().copies(most).run() == (0, 1, 0)  # there is no kernel to make it
    # The kernel that comes last makes them, and those of none are left out.
    assert Call().waits(0).rings().copies(most, (floats(0), floats(0))).run() == (2, 0, 1)


def bytes_of_copies() -> None:
    to, what = floats(4), floats(4, 7)
    big, large = floats(4096), floats(4096, 8)
    both = Call().rings().copies((to, what), (big, large))
    assert both.run([8, 0]) == (1, 0, 1)
    assert on_host(to).tolist() == [7, 7, 0, 0]
    assert both.run([16, 4]) == (1, 0, 2)
    assert both.run([16, 1 << 40]) == (1, 1, 1)  # no more than there are
    assert on_host(big).eq(8).all()
    assert value(both.flag) == value(both.count) == 3
    refuses(lambda: both.made.run([0, -1]), fserver.ConfigError, r"^send: bytes\[1\] is -1")


def one_thread() -> None:
    """While the driver waits for one thread, another is refused, and the mark is not passed."""
    call, seen = Call().rings(), list[bool]()

    def second() -> None:
        while not DRIVER.waiting:
            time.sleep(0.001)
        try:
            seen.append(call.mark.passed())
            text = "^send: another thread is in a call of this channel .open a channel for each"
            refuses(lambda: call.mark.use("send", call.run), fserver.ConfigError, text)
            seen.append(True)
        finally:
            DRIVER.waits = 0

    thread = threading.Thread(target=second, daemon=True)
    DRIVER.waits = 1
    thread.start()
    assert call.mark.use("send", call.run, None) == (1, 0, 0)
    thread.join()
    assert seen == [False, True] and call.mark.passed() and DRIVER.waited_in_vain == 0
    for _ in range(2):  # an error leaves it free
        with pytest.raises(IndexError):
            call.mark.use("send", list[int]().pop)
    call.run()


def waits() -> None:
    """Where it waits, and what ends that."""
    call = Call().waits(2)
    missed = DRIVER.missed
    ctypes.c_int64.from_address(call.done.data_ptr()).value = 2
    call.run()
    assert DRIVER.missed == missed
    assert value(call.asked) == 2
    assert DRIVER.wait_since == 0
    assert list(page()) == [0, 0, 0]
    call.run()
    assert DRIVER.missed == missed + 1  # done is less
    DRIVER.capturing = 1
    assert call.made.run(None) == GRAPH
    assert DRIVER.wait_since == 2**64 - 1
    DRIVER.capturing = 0


def streams() -> None:
    """The mark of a side is on the stream that was used last. Graphs are counted beside it."""
    first = Call().rings()
    other = Call(first.mark).rings()
    released(lambda: first.made.run(None))
    DRIVER.unpassed = 1
    assert not first.mark.passed()
    assert other.run() == (1, 0, 0)
    DRIVER.current_stream = 2
    before = DRIVER.launches
    assert other.made.run(None) == ELSEWHERE
    assert (DRIVER.launches, value(other.flag)) == (before, 1)
    DRIVER.capturing = 1
    events = DRIVER.events
    assert other.made.run(None) == GRAPH
    assert DRIVER.events == events
    DRIVER.capturing = 0
    DRIVER.unpassed = 0
    assert first.mark.passed()
    assert first.mark.in_graphs()
    DRIVER.drop_graph()
    assert not first.mark.in_graphs()
    assert other.run() == (1, 0, 0)
    DRIVER.current_stream = 1


def wrong() -> None:
    text = "^send: a tensor of 12 bytes is copied to one of 8$"
    refuses(lambda: Call().copies((floats(2), floats(3))), fserver.ShapeError, text)
    text = "^send: count is on another device than cuda:0"
    second = fserver.map_pinned_tensor(torch.tensor([0]), 1)
    refuses(lambda: Call().made.ring(second, word(), True), fserver.ConfigError, text)
    for fails in (1, 2):
        call = Call().waits().rings().copies((floats(3), floats(3)))
        DRIVER.fail_launch_at = DRIVER.launches + fails
        refuses(lambda call=call: call.made.run(None), fserver.Error, "^send: launch a kernel: ")
        DRIVER.fail_launch_at = 0
        assert value(call.flag) == 0
        DRIVER.unpassed = 1
        assert not call.mark.passed()  # a part of it may wait
        DRIVER.unpassed = 0
    call = Call().copies((floats(3000), floats(3000)))
    DRIVER.fail_copy = DRIVER.copies + 1
    refuses(lambda: call.made.run(None), fserver.Error, "^send: copy a tensor of the channel: ")
    DRIVER.fail_copy = 0


# The tests.


@pytest.mark.parametrize(
    "check", [small_copies, bytes_of_copies, one_thread, waits, streams, wrong]
)
def test_host_call(driver: Forks, check: Callable[[], None]) -> None:  # noqa: F811
    over(driver, check)


if __name__ == "__main__":
    run_check(globals())
