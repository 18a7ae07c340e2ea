"""How the device's part of a channel ends: by a peer, a time-out, an error, or close().

Over a driver without a GPU: see lanes.py."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Callable
from itertools import count, product

import pytest
from lanes import (
    DRIVER,
    ENDED,
    LATE,
    LOST,
    PARTED,
    SECOND,
    Side,
    at_rest,
    exchange,
    on_gpus,
    opened,
    over_driver,
    pair,
    refuses,
    run_check,
)
from nodes import LIMIT as WAIT
from nodes import eventually, open_cluster, together

import fserver
from fserver import _loader
from fserver.channel.tune import whole

CAPTURES = count(1)


@over_driver()
def test_peer_that_has_closed_ce() -> None:
    """It takes nothing any more, and what it sent before still comes."""
    w, s = pair("copy")
    exchange(w, s, 1)
    w.out[0].fill(3)
    w.lane.send()
    s.lane.recv()
    s.out[0].fill(4)
    s.lane.send()
    w.end(PARTED)
    time.sleep(0.3)  # longer than what is here may take
    w.lane.recv()  # sent before the peer closed
    assert (w.into[0].value, w.lane.status()) == (4, (0, 0))
    w.out[0].fill(5)
    refuses(w.lane.send, fserver.ClosedError, "^send: a peer has closed .*the channel has ended")
    assert s.into[0].value == 3
    assert w.lane.status() == (0, 0)
    w.lane.close()
    s.lane.close()

    w, s = pair("copy")
    exchange(w, s, 1)
    w.lane.send()
    w.end(PARTED)
    w.lane.recv()  # what does not come any more ends
    assert DRIVER.waited_in_vain == 0
    assert w.into[0].value == 2
    assert w.lane.status() == (LOST, 0)
    for call in (w.lane.send, w.lane.recv):
        refuses(call, fserver.ClosedError, "a peer has closed .*the channel has ended")

    w, _ = pair("copy", timeout_ms=600)
    w.lane.send()
    w.end(PARTED, peer=1)  # not who is waited for
    w.lane.recv()
    assert w.lane.status() == (LATE, 0)


@over_driver()
def test_peer_that_has_closed_sm() -> None:
    """The same of kernels."""
    w, _ = pair("kernel")
    w.lane.send()
    w.end(PARTED)
    w.lane.recv()
    assert (DRIVER.launches, w.lane.status()) == (2, (0, 0))
    refuses(w.lane.send, fserver.ClosedError, "^send: a peer has closed .*the channel has ended")
    assert DRIVER.launches == 2
    w.end(PARTED, LOST)
    assert w.lane.status() == (LOST, 0)
    for call in (w.lane.send, w.lane.recv):
        refuses(call, fserver.ClosedError, "a peer has closed .*the channel has ended")
    assert DRIVER.launches == 2


@over_driver()
def test_late_peer() -> None:
    w, _ = pair("copy", timeout_ms=100)
    w.lane.send()
    w.lane.recv()
    assert DRIVER.copies == 1  # of the tensor
    assert (DRIVER.waited_in_vain, w.lane.status()) == (0, (LATE, 0))
    text = r"peer 0 has not responded within timeout_ms .*the channel has ended \(call close\(\) on"
    for call in (w.lane.send, w.lane.recv):
        refuses(call, fserver.TimeoutError, text)


@over_driver("one", "both", "later", "full", "stream")
def test_late_peer_while_others_wait(how: str) -> None:
    """So many of the watcher's streams are in one queue with a stream that waits. Where another
    context is not to be had, what is copied over the flags goes no further."""
    behind = 1 if how == "one" else 2
    DRIVER.fail_second = how in ("full", "later")
    DRIVER.fail_stream = SECOND if how == "stream" else 0
    if how == "later":  # memory is free again
        threading.Timer(1, setattr, (DRIVER, "fail_second", 0)).start()
    before = at_rest()
    DRIVER.foreign = 1  # so there are landing buffers
    w, s = pair("copy", timeout_ms=100, install=False, count=200)
    DRIVER.behind = behind
    for side in (w, s):
        side.plan.install()
    w.lane.send()
    w.lane.recv()
    assert (DRIVER.behind, DRIVER.waited_in_vain, w.lane.status()) == (0, 0, (LATE, 0))
    assert DRIVER.seconds == (how in ("both", "later", "stream"))
    at, flags, used = w.plan.arena, w.plan.layout["flags"], w.plan.used
    assert used - flags == 128 << 10
    copied = how in ("full", "stream")
    last = ctypes.c_uint32.from_address(at + used - 4)
    eventually(lambda: last.value == copied)  # a wait ends as soon as its own flag is filled
    fills = DRIVER.copies - 400  # the tensors, 200 each way
    assert fills % 2 == 0 and (fills > 0) == copied  # the watcher looks again if the stream is late
    assert not any(ctypes.string_at(at, flags) + ctypes.string_at(at + used, 4096))
    for side in (w, s):
        side.lane.close()
    assert (DRIVER.seconds, DRIVER.held, DRIVER.misplaced) == (0, before, 0)


def behind_others() -> tuple[Side, Side]:
    """A channel with a short time-out whose worker's watcher is kept."""
    w, s = pair("copy", timeout_ms=100, install=False)
    DRIVER.behind = 2
    w.plan.install()
    s.plan.install()
    return w, s


@over_driver()
def test_one_context_ends_all_waits() -> None:
    """For all channels of a GPU, until nobody holds it. Without a wait there is none."""
    before = at_rest()
    for _ in range(2):
        pairs = [behind_others() for _ in range(3)]
        pairs[0][0].end(ENDED)
        time.sleep(0.4)
        assert DRIVER.seconds == 0
        for w, _ in pairs[1:]:
            w.lane.send()
            w.lane.recv()
        assert (DRIVER.waited_in_vain, DRIVER.seconds) == (0, 1)
        for w, _ in pairs:
            assert DRIVER.seconds == 1
            w.lane.close()
        assert DRIVER.seconds == 0
        for _, s in pairs:
            s.lane.close()
        assert (DRIVER.held, DRIVER.misplaced) == (before, 0)


@over_driver()
def test_no_context_to_end_waits() -> None:
    """Where it is not to be had for the first wait it is not tried for as long for the next, but is
    again some time later."""

    def ended_after() -> float:
        sides = behind_others()
        started = time.monotonic()
        sides[0].lane.send()
        sides[0].lane.recv()
        took = time.monotonic() - started
        assert (DRIVER.waited_in_vain, sides[0].lane.status()) == (0, (LATE, 0))
        for side in sides:
            side.lane.close()
        return took

    DRIVER.fail_second = 1
    assert ended_after() > 3
    assert ended_after() < 2
    copies = DRIVER.copies
    time.sleep(3.1)
    threading.Timer(1, setattr, (DRIVER, "fail_second", 0)).start()
    assert ended_after() < 3
    assert DRIVER.copies == copies + 1  # of the tensor


@over_driver()
def test_context_of_a_holder() -> None:
    """It does not end while kernels of another channel may wait, also where memory is short, and
    the next channel takes it."""
    before = at_rest()
    held = pair("kernel")
    for _ in range(3):
        sides = behind_others()
        sides[0].lane.send()
        sides[0].lane.recv()
        for side in sides:
            side.lane.close()
        assert DRIVER.seconds == 1
    DRIVER.full = 1
    for side in pair("copy"):
        side.lane.close()
    assert (DRIVER.full, DRIVER.seconds) == (0, 1)
    exchange(*held, 1)
    for side in held:
        side.lane.close()
    assert (DRIVER.waited_in_vain, DRIVER.seconds) == (0, 0)
    assert (DRIVER.held, DRIVER.misplaced) == (before, 0)


@over_driver("kernel", "copy")
def test_ended(mode: str) -> None:
    """As by a lost peer."""
    w, _ = pair(mode)
    w.lane.send()
    w.end(ENDED)
    for call in (w.lane.send, w.lane.recv):
        refuses(call, fserver.Error, r"the channel has ended: check\(\) raises the reason \(call")
    assert w.lane.status() == (LOST, -1)
    w.end(ENDED, LOST, 3)
    refuses(w.lane.recv, fserver.Error, "the channel has ended")

    def why() -> None:
        raise fserver.PeerLostError("server 0 is gone")

    w.lane.explain(why)
    refuses(w.lane.recv, fserver.PeerLostError, "server 0 is gone")
    w.lane.explain(lambda: None)
    refuses(w.lane.recv, fserver.Error, "the channel has ended")
    assert w.lane.status() == (LOST, 3)
    w.lane.close()
    refuses(w.lane.recv, fserver.ClosedError, "the channel is closed")


@over_driver("0", "1", "2", "pinned", "context")
def test_channel_that_cannot_be_watched(how: str) -> None:
    """Without the thread of mode "copy" nothing ends a wait: the channel does not open, and what
    there was of it is given back, as so many streams."""
    before = at_rest()
    w, s = pair("copy", install=False)
    what, text = {
        "context": ("fail_context", "make the context of the GPU current"),
        "pinned": ("fail_host", "allocate pinned memory: out of memory"),
    }.get(how, ("fail_stream", "create a stream: out of memory"))
    DRIVER.fail_later = int(how) if how.isdecimal() else 0
    setattr(DRIVER, what, 2 if how == "context" else 1)
    refuses(w.plan.install, fserver.Error, text)
    setattr(DRIVER, what, 0)
    w.lane.close()
    s.plan.install()
    s.lane.close()
    end = time.monotonic() + WAIT
    while DRIVER.held > before and time.monotonic() < end:
        time.sleep(0.001)
    assert (DRIVER.held, DRIVER.fail_later) == (before, 0)


@over_driver()
def test_close_in_a_broken_context() -> None:
    """The context is, by an illegal access elsewhere in the process."""
    w, s = pair("copy")
    exchange(w, s, 1)
    DRIVER.fail_context = 1
    w.lane.close()
    del w, s  # no thread is left


@over_driver(*product(("kernel", "copy"), ("send", "recv")))
def test_failed_half_way(mode: str, call: str) -> None:
    """A side has enqueued a part of a message when the driver refuses the rest. The sides would
    count differently from then on: the channel ends, for all of them."""
    on_gpus()
    DRIVER.foreign = 1  # what comes is copied from a landing buffer then
    cluster = open_cluster(servers=2)
    w, *servers = opened(cluster, mode, "it", 30 if mode == "kernel" else 1)
    mine, others = (w, servers) if call == "send" else (servers[0], [w])
    if call == "recv":
        w.send()
    DRIVER.fail_launch_at = DRIVER.launches + 2
    DRIVER.fail_copy = DRIVER.copies + (2 if call == "send" else 1)
    with pytest.raises(fserver.Error, match=f"^channel: {call}: an error") as caught:
        getattr(mine, call)()
    who = "worker" if call == "send" else "server"
    reason = re.escape(
        f"channel 'it': {who} 0 has closed its side: {caught.value} (close this side"
    )
    done = DRIVER.launches, DRIVER.copies
    for again in ("send", "recv"):
        text = f"^{again}: an earlier {call} failed after a part .*the channel has ended"
        refuses(getattr(mine, again), fserver.Error, text)
    assert (DRIVER.launches, DRIVER.copies) == done
    refuses(mine.check, fserver.Error, "'it': an earlier send or recv failed after")
    for other in others:  # as by a peer that has closed, and they are told why
        end = time.monotonic() + WAIT
        with pytest.raises(fserver.ClosedError, match=reason):
            while time.monotonic() < end:
                other.check()
        refuses(other.send, fserver.ClosedError, reason)
    before = DRIVER.held
    together([ch.close for ch in (w, *servers)])
    assert DRIVER.held < before
    w, *servers = opened(cluster, mode, "it")
    assert [ch.path for ch in (w, *servers)] == [mode] * 3
    cluster.close()


@over_driver("kernel", "copy")
def test_closed_by_a_peer(mode: str) -> None:
    """In good order: the next call says which one."""
    on_gpus()
    cluster = open_cluster()
    w, s = opened(cluster, mode, "it")
    closing = threading.Thread(target=s.close)
    closing.start()
    end = time.monotonic() + WAIT
    text = '"it": peer 0 has closed its side .close this side and open a new channel'
    with pytest.raises(fserver.ClosedError, match=text):
        while time.monotonic() < end:
            w.check()
    whole(w)  # all that was sent has come
    refuses(w.send, fserver.ClosedError, text)
    w._side.lane.abort()
    refuses(lambda: whole(w), fserver.ClosedError, text)
    w.close()
    closing.join()
    cluster.close()


@over_driver()
def test_failed_in_a_capture() -> None:
    """What was captured before never runs: the channel goes on."""
    on_gpus()
    cluster = open_cluster()
    w, s = opened(cluster, "kernel", "it", 30)
    DRIVER.capturing = 1
    DRIVER.fail_launch_at = DRIVER.launches + 2
    refuses(w.send, fserver.Error, "^channel: send: an error")
    DRIVER.capturing = 0
    done = DRIVER.launches
    for call in (w.send, s.recv, s.send, w.recv):
        call()
    assert DRIVER.launches == done + 4 * 2
    w.check()
    s.check()
    cluster.close()


def capture(*calls: Callable[[], None]) -> None:
    DRIVER.capturing = next(CAPTURES)
    for call in calls:
        call()
    DRIVER.capturing = 0


def taken(side: Side, times: int) -> None:
    """As waits of a stream that graphs have enqueued take a flag, although no peer sets it."""
    flag = ctypes.c_uint32.from_address(side.plan.arena + side.plan.layout["flags"])
    for _ in range(times):
        flag.value = 0
        eventually(lambda: flag.value == 1)


@over_driver("kernel", "copy")
def test_closed_during_a_capture(mode: str) -> None:
    """What a stream may still use is not freed before the GPU has done all: not while another
    thread captures, which forbids to wait for it, nor where the closing thread does. And what the
    stream waits for ends."""
    before = at_rest()
    w, s = pair(mode)
    for side in (w, s):
        capture(side.lane.send if side is w else side.lane.recv)
    DRIVER.drop_graph()
    DRIVER.unfinished = 3
    assert w.lane.close()
    assert DRIVER.unfinished == 0
    kept = DRIVER.held
    DRIVER.capturing = 1
    start = time.monotonic()
    assert not s.lane.close()
    assert time.monotonic() - start < 10
    assert before < DRIVER.held == kept
    DRIVER.capturing = 0
    if mode == "copy":
        taken(s, 3)
    assert s.lane.close()
    assert DRIVER.held == before


@over_driver("kernel", "copy")
def test_closed_while_its_stream_is_captured(mode: str) -> None:
    """One that was never captured does not ask a stream that is."""
    before = at_rest()
    w, s = pair(mode)
    w.lane.send()
    s.lane.recv()
    DRIVER.capturing = next(CAPTURES)
    spoiled = DRIVER.spoiled
    assert not w.lane.close() and not s.lane.close()
    assert DRIVER.spoiled == spoiled
    DRIVER.capturing = 0
    assert w.lane.close() and s.lane.close()
    assert DRIVER.held == before


@over_driver("kernel", "copy")
def test_closed_before_its_graphs(mode: str) -> None:
    """What a graph names lives as long as the graph does. Replayed, it waits for nobody, and its
    kernels send nothing."""
    before = at_rest()
    w, s = pair(mode)
    objects = DRIVER.retains
    capture(w.lane.send, w.lane.recv)
    capture(w.lane.send)
    assert DRIVER.retains - objects == 2
    assert s.lane.close()
    held = DRIVER.held
    assert not w.lane.close()
    for call in (w.lane.send, w.lane.recv):
        refuses(call, fserver.ClosedError, "the channel is closed")
    assert DRIVER.held == held
    dead = ctypes.c_uint32.from_address(w.plan.arena + w.plan.layout["dead"])
    assert bool(dead.value) == (mode == "kernel")
    if mode == "copy":
        taken(w, 3)
    lane = w.lane
    del w
    gc.collect()
    assert not lane.close()
    DRIVER.drop_graph()
    assert lane.close() and lane.close()
    assert DRIVER.held == before


@over_driver("kernel", "copy")
def test_collected_before_its_graphs(mode: str) -> None:
    """It stays until another lane is made after that."""
    before = at_rest()
    w, s = pair(mode)
    capture(w.lane.send)
    assert s.lane.close()
    del w
    gc.collect()
    held = at_rest()
    DRIVER.drop_graph()
    assert DRIVER.held == held > before
    assert at_rest() == before


@over_driver()
def test_no_limit() -> None:
    """A time-out that is too large for nanoseconds is none, and not one of 0."""
    lane = _loader.load().Lane
    for ms in (1e14, float("inf")):
        w, _ = pair("copy", timeout_ms=ms)
        w.lane.send()
        w.lane.recv()  # until the driver's own patience is over
        assert (DRIVER.waited_in_vain, w.lane.status()) == (1, (0, 0))
        DRIVER.waited_in_vain = 0
        w.lane.close()
    for ms in (-1, float("nan"), "1"):
        text = "^channel: timeout_ms is .*, want a number of milliseconds, 0 or more"
        refuses(lambda ms=ms: lane(0, b"", ms, False), fserver.ConfigError, text)


@over_driver("kernel", "copy")
def test_in_two_threads(mode: str) -> None:
    """A channel is of one thread at a time; another may close it, which waits for the call."""
    w, s = pair(mode)
    DRIVER.waits = 1
    sends = threading.Thread(target=w.lane.send, daemon=True)
    sends.start()
    while not DRIVER.waiting:
        time.sleep(0.001)
    for call, name in ((w.lane.send, "send"), (w.lane.recv, "recv")):
        text = f"^{name}: another thread is in a call of this channel .open a channel for each"
        refuses(call, fserver.ConfigError, text)
    closes = threading.Thread(target=w.lane.close, daemon=True)
    closes.start()
    end = ctypes.c_uint32.from_address(w.lane.abort_word)
    while end.value != ENDED:
        time.sleep(0.001)
    closes.join(0.05)
    held = DRIVER.held
    assert not w.lane.close()  # a third thread
    assert DRIVER.held == held
    assert closes.is_alive() and sends.is_alive()
    DRIVER.waits = 0  # as a kernel ends that has seen the word
    closes.join()
    sends.join()
    refuses(w.lane.send, fserver.ClosedError, "^send: the channel is closed")
    assert (s.lane.status(), DRIVER.waited_in_vain) == ((0, 0), 0)


class ClosesLast:
    """Closes a lane when the interpreter ends, behind all that is registered for that."""

    def __init__(self, *sides: Side) -> None:
        self.sides, self.waits = sides, DRIVER._at("waits")

    def __del__(self) -> None:
        self.waits.value = 0
        self.sides[0].lane.close()


@over_driver("kernel", "copy", finalize=True)
def test_busy_at_exit(mode: str) -> None:
    """A thread that the interpreter has left behind never comes back from its call."""
    global LAST
    w, s = pair(mode)
    LAST = ClosesLast(w, s)
    DRIVER.waits = 1
    threading.Thread(target=w.lane.send, daemon=True).start()
    while not DRIVER.waiting:
        time.sleep(0.001)


@over_driver()
def test_a_child_of_fork_leaves_the_channel_alone() -> None:
    """Whatever of its memory the two share."""
    w, s = pair("copy")
    exchange(w, s, 1)
    child = os.fork()
    if not child:
        ok = True
        for call in (w.lane.send, lambda: w.lane.allocate(1)):
            try:
                call()
                ok = False
            except fserver.Error as error:
                ok = ok and "before this process was forked" in str(error)
        w.lane.finish()
        w.lane.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert w.lane.status() == (0, 0)
    exchange(w, s, 3)


if __name__ == "__main__":
    run_check(globals())
