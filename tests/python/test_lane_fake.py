"""The device's part of stream channels (csrc/lane*.cc), and whole channels, over a driver without a
GPU: what they do when something goes wrong. Each check runs in a process of its own, which finds
this driver first; tests/gpu/test_lane.py has the messages themselves."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forks
from nodes import LIMIT as WAIT
from nodes import Cluster, open_cluster, together

import fserver
from fserver import _loader
from fserver.channel import nvrtc, opener
from fserver.channel.gpu import GpuSide
from fserver.channel.plan import LANDING, PACKETS, PLACE, Piece, Plan
from fserver.channel.tune import whole

LIMIT = 60  # seconds for a check
HERE = Path(__file__).resolve().parent
CC, CXX = os.environ.get("CC", "cc"), os.environ.get("CXX", "g++")
ROWS = 16
LOST, LATE = 1, 2  # of cs_channel.h
SECOND = 0x100  # of fakelane.c: another context of the first GPU
LARGE = ("launched_bytes", "wait_page", "wait_since", "wait_patience")  # of fakelane.c
UNSUPPORTED = 217  # of the driver: peer access
ENDED, PARTED = 1, 2  # what the engine writes into the word that ends a channel


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts processes that find our libcuda.so.1, and libfakeguard.so, which gives torch its
    streams."""
    for compiler in (CC, CXX):
        if shutil.which(compiler) is None:
            pytest.skip(f"no {compiler}")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    home = Path(torch.__file__).parent
    torch_flags = ["-std=c++20", "-isystem", home / "include", f"-Wl,-rpath,{home / 'lib'}"]
    for command in (
        [CC, *flags, "-o", folder / "libcuda.so.1", HERE / "fakelane.c"],
        [
            CXX, *flags, *torch_flags, "-o", folder / "libfakeguard.so", HERE / "fakeguard.cc",
            f"-L{home / 'lib'}", "-lc10",
        ],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    forks = Forks(LD_LIBRARY_PATH=str(folder))
    yield forks
    forks.close()


def over(driver: Forks, check: Callable[..., None], *arguments: str) -> None:
    """Runs a function of a test file in a child, over the driver."""
    done = driver.run(check.__code__.co_filename, check.__name__, *arguments, limit=LIMIT)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    assert done.stdout.endswith("checked\n"), done


# What follows runs in the child.


class Driver:
    """The variables of fakelane.c, and of fakeguard.cc, as attributes."""

    def __init__(self) -> None:
        self.__dict__["_library"] = ctypes.CDLL("libcuda.so.1")
        self.__dict__["_guard"] = ctypes.CDLL("libfakeguard.so")
        self._guard.install()

    def _at(self, name: str) -> Any:
        kind = ctypes.c_uint64 if name in LARGE else ctypes.c_int
        return kind.in_dll(self._guard if name == "current_stream" else self._library, name)

    def __getattr__(self, name: str) -> int:
        return self._at(name).value

    def __setattr__(self, name: str, value: int) -> None:
        self._at(name).value = value


def at_rest() -> int:
    """What is held when the engine has opened the GPUs, whose contexts it keeps."""
    for index in range(2):
        _loader.load().Lane(index, b"", 1000.0, False).close()
    return DRIVER.held


class Tensor:
    """Memory in the place of a tensor."""

    def __init__(self, size: int) -> None:
        self._memory = ctypes.create_string_buffer(size + 4096)
        self.size, self.at = size, (ctypes.addressof(self._memory) + 4095) & ~4095

    def fill(self, value: int) -> None:
        ctypes.memset(self.at, value, self.size)

    @property
    def value(self) -> int:
        data = set(ctypes.string_at(self.at, self.size))
        assert len(data) == 1
        return data.pop()


class Side:
    """A lane, its plan, and the tensors that it sends and receives."""

    def __init__(self, index: int, mode: str, timeout_ms: float, size: int, count: int) -> None:
        image = b"kernels" if mode == "kernel" else b""
        self.lane = _loader.load().Lane(index, image, timeout_ms, False)
        self.out, self.into = ([Tensor(size) for _ in range(count)] for _ in range(2))
        outgoing, incoming = (
            [[Piece(t.at, ROWS, size // ROWS) for t in row]] for row in (self.out, self.into)
        )
        self.plan = Plan(self.lane, index, mode, outgoing, incoming, index == 0)

    def rows(self) -> list[int]:
        """As they were told of the newest message."""
        address, counts = self.plan.rows
        return list((ctypes.c_uint64 * sum(counts)).from_address(address))

    def end(self, word: int, why: int = 0, peer: int = 0) -> None:
        """As the engine does it, and then a kernel."""
        words = (ctypes.c_uint32 * 5).from_address(self.lane.abort_word)
        words[4] |= int(word == PARTED) << peer
        words[:2] = [word, why and why | peer << 8]


def pair(
    mode: str, *, timeout_ms: float = 10000, size: int = 64, count: int = 1, install: bool = True
) -> tuple[Side, Side]:
    """The worker's and the server's side of a channel with tensors both ways."""
    w, s = (Side(i, mode, timeout_ms, size, count) for i in (0, 1))
    told = s.plan.describe(0), w.plan.describe(0)
    for side, theirs in zip((w, s), told, strict=True):
        side.plan.attach(0, theirs)
        if install:
            side.plan.install()
    return w, s


def on_gpus() -> None:
    """Has channels of CPU tensors be those of two GPUs: a worker's is 0, a server's 1."""

    made = opener._gpu

    def side(_: Any, how: Any, out: Any, into: Any, send_first: bool) -> GpuSide:
        return made(torch.device("cuda", 0 if send_first else 1), how, out, into, send_first)

    def rows(self: GpuSide) -> list[torch.Tensor]:
        address, counts = self.plan.rows
        words = (ctypes.c_int64 * sum(counts)).from_address(address)
        return list(torch.frombuffer(words, dtype=torch.int64).split(counts))

    patches: list[tuple[Any, str, Any]] = [
        (opener, "_direct", lambda mode, device: mode != "host"),
        (opener, "_gpu", side),
        (GpuSide, "rows", rows),
        (nvrtc, "image", lambda source, arch: b"kernels"),
        (_loader.load().Lane, "hold", lambda lane, tensors: None),
    ]
    for where, name, what in patches:
        setattr(where, name, what)


def opened(cluster: Cluster, mode: str, name: str, count: int = 1) -> list[Any]:
    """A channel with so many tensors each way: the worker's side and those of the servers. Instead
    of one, what was raised."""
    n = len(cluster.servers)
    there, back = list(range(count)), list(range(count, 2 * count))
    x, *ys = ([torch.zeros(ROWS, 4) for _ in there] for _ in range(n + 1))

    def tried(call: Callable[..., Any], *tensors: Any) -> Any:
        try:
            return call(*tensors, mode=mode, name=name, timeout_ms=1e3 * WAIT)
        except Exception as error:
            return error

    def serve(server: Any) -> Callable[[], Any]:
        return lambda: tried(server.channel, there, [torch.zeros(ROWS, 4) for _ in back], back)

    return together(
        [
            lambda: tried(cluster.worker.channel, x, there, [t for y in ys for t in y], back),
            *map(serve, cluster.servers),
        ]
    )


def exchanged(w: Any, s: Any, value: float) -> None:
    """With mode "copy", or "host"."""
    x, y, z = w.outgoing[0], w.incoming[0], s.outgoing[0]
    x.fill_(value)
    w.send()
    s.recv()
    z.copy_(s.incoming[0] * 2)
    s.send()
    w.recv()
    assert y.tolist() == [[2 * value] * 4] * ROWS


def exchange(w: Side, s: Side, value: int) -> None:
    """With mode "copy"."""
    w.out[0].fill(value)
    w.lane.send()
    s.lane.recv()
    assert s.into[0].value == value
    s.out[0].fill(value + 1)
    s.lane.send()
    w.lane.recv()
    assert w.into[0].value == value + 1


def refuses(call: Callable[[], None], kind: type[fserver.Error], text: str) -> None:
    with pytest.raises(fserver.Error, match=text) as error:
        call()
    assert type(error.value) is kind, error.value


def parted_ce() -> None:
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


def parted_sm() -> None:
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


@pytest.mark.parametrize("check", [parted_ce, parted_sm])
def test_peer_that_has_closed(driver: Forks, check: Callable[[], None]) -> None:
    """It takes nothing any more, and what it sent before still comes."""
    over(driver, check)


def late() -> None:
    w, _ = pair("copy", timeout_ms=100)
    w.lane.send()
    w.lane.recv()
    assert DRIVER.copies == 1  # of the tensor
    assert (DRIVER.waited_in_vain, w.lane.status()) == (0, (LATE, 0))
    text = r"peer 0 has not responded within timeout_ms .*the channel has ended \(call close\(\) on"
    for call in (w.lane.send, w.lane.recv):
        refuses(call, fserver.TimeoutError, text)


def late_behind_others(how: str) -> None:
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
    assert DRIVER.copies == 400 + 2 * copied  # the tensors, 200 each way
    assert ctypes.c_uint32.from_address(at + used - 4).value == copied
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


def one_context() -> None:
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


def no_context() -> None:
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


def context_of_a_holder() -> None:
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


def ended(mode: str) -> None:
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


def unwatched(how: str) -> None:
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


def broken() -> None:
    """The context is, by an illegal access elsewhere in the process."""
    w, s = pair("copy")
    exchange(w, s, 1)
    DRIVER.fail_context = 1
    w.lane.close()
    del w, s  # no thread is left


@pytest.mark.parametrize("how", ["0", "1", "2", "pinned", "context"])
def test_channel_that_cannot_be_watched(driver: Forks, how: str) -> None:
    over(driver, unwatched, how)


def test_close_in_a_broken_context(driver: Forks) -> None:
    over(driver, broken)


def rows_after_an_error_sm() -> None:
    size = 1 << 20  # in place, by flags
    w, _ = pair("kernel", size=size)
    everything = (ROWS, size)
    w.lane.send()
    assert (DRIVER.launched_rows, DRIVER.launched_bytes) == everything
    w.lane.recv()
    w.lane.send([3])
    assert (DRIVER.launched_rows, DRIVER.launched_bytes) == (3, 3 * size // ROWS)
    w.lane.recv()
    DRIVER.fail_launch = 1
    refuses(lambda: w.lane.send([3]), fserver.Error, "^channel: send: an error")
    w.lane.send()
    assert (DRIVER.launched_rows, DRIVER.launched_bytes) == everything


def rows_after_an_error_ce() -> None:
    w, s = pair("copy", count=2)
    exchange(w, s, 1)
    DRIVER.fail_copy = DRIVER.copies + 2
    refuses(lambda: w.lane.send([3, 4]), fserver.Error, "^channel: send: an error")
    assert s.rows() == [3, 0]
    w.lane.send()
    assert s.rows() == [ROWS, ROWS]
    s.lane.recv()
    s.lane.send([5, 6])
    assert w.rows() == [5, 6]


@pytest.mark.parametrize("check", [rows_after_an_error_sm, rows_after_an_error_ce])
def test_rows_after_an_error(driver: Forks, check: Callable[[], None]) -> None:
    """A send() of all rows sends them, and says so, after one of fewer has failed."""
    over(driver, check)


def failed_half_way(mode: str, call: str) -> None:
    """A side has enqueued a part of a message when the driver refuses the rest."""
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


@pytest.mark.parametrize("mode", ["kernel", "copy"])
@pytest.mark.parametrize("call", ["send", "recv"])
def test_failed_half_way(driver: Forks, mode: str, call: str) -> None:
    """The sides would count differently from then on: the channel ends, for all of them."""
    over(driver, failed_half_way, mode, call)


def closed_by_a_peer(mode: str) -> None:
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


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_closed_by_a_peer(driver: Forks, mode: str) -> None:
    """In good order: the next call says which one."""
    over(driver, closed_by_a_peer, mode)


def failed_in_a_capture() -> None:
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


def test_failed_in_a_capture(driver: Forks) -> None:
    """What was captured before never runs: the channel goes on."""
    over(driver, failed_in_a_capture)


def whole_messages(mode: str, memory: str) -> None:
    """Data there and back, of tensors by all ways, in full and in part."""
    on_gpus()
    torch.manual_seed(0)
    DRIVER.foreign = int(memory == "foreign")
    kinds = (torch.zeros(ROWS, 4), torch.zeros(3, dtype=torch.uint8), torch.zeros(300, 333))
    kinds += (torch.zeros(0, 7), torch.zeros(ROWS, 20001, dtype=torch.uint8))
    cluster = open_cluster(servers=2)
    x, y0, y1, z0, z1 = ([fresh(t) for t in kinds] for _ in range(5))
    keys = list(range(len(kinds)))
    options: dict[str, Any] = {"mode": mode, "timeout_ms": 1e3 * WAIT}
    w, *servers = together(
        [
            lambda: cluster.worker.channel(x, keys, [*y0, *y1], keys, **options),
            lambda: cluster.servers[0].channel(keys, z0, keys, **options),
            lambda: cluster.servers[1].channel(keys, z1, keys, **options),
        ]
    )
    ways = {e.kind for e in servers[0]._side.plan._incoming[0] if e.piece.bytes}
    large = LANDING if DRIVER.foreign else PLACE
    assert ways == ({large, PACKETS} if mode == "kernel" else {large})
    for rows in (None, [7, 2, 123, 0, 5], None):
        for t in (*x, *z0, *z1):
            t.copy_(fresh(t))
        w.send(rows)
        for s in servers:
            s.recv()
            arrived(x, s.incoming, s.rows[0], rows)
            s.send(rows)
        w.recv()
        for i, z in enumerate((z0, z1)):
            arrived(z, w.tensors[i], w.rows[i], rows)
    assert DRIVER.missed == 0
    assert (DRIVER.spinning, DRIVER.waiters) == (0, 0)  # what lands is waited for by one block
    cluster.close()


def fresh(like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 256, like.shape).to(like.dtype)


def arrived(
    sent: list[torch.Tensor], got: list[torch.Tensor], told: torch.Tensor, rows: list[int] | None
) -> None:
    rows = rows or [len(t) for t in sent]
    assert told.tolist() == rows
    for a, b, n in zip(sent, got, rows, strict=True):
        assert torch.equal(a[:n], b[:n])


@pytest.mark.parametrize("mode", ["kernel", "copy"])
@pytest.mark.parametrize("memory", ["own", "foreign"])
def test_whole_messages(driver: Forks, mode: str, memory: str) -> None:
    """Foreign: that no IPC handle names, which is copied from a landing buffer."""
    over(driver, whole_messages, mode, memory)


def two_streams(mode: str) -> None:
    w, s = pair(mode)
    w.lane.send()
    s.lane.recv()
    s.lane.send()
    DRIVER.busy, DRIVER.current_stream = 1, 2
    done = DRIVER.launches, DRIVER.copies
    text = "^recv: the channel is still in use on another stream .synchronize that stream first"
    refuses(w.lane.recv, fserver.ConfigError, text)
    assert (DRIVER.launches, DRIVER.copies) == done
    DRIVER.current_stream = 1
    w.lane.recv()
    DRIVER.busy, DRIVER.current_stream = 0, 2  # that one has done all
    w.lane.send()
    s.lane.recv()
    s.lane.send()
    DRIVER.busy, DRIVER.current_stream = 1, 1
    DRIVER.capturing = 1  # who asks then ends the capture
    asked = DRIVER.asked
    w.lane.recv()
    assert DRIVER.asked == asked
    DRIVER.capturing = 0


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_two_streams(driver: Forks, mode: str) -> None:
    over(driver, two_streams, mode)


def wrong_rows(mode: str) -> None:
    w, s = pair(mode)
    w.out[0].fill(7)
    for rows, text in (
        ([4, 9, 9], "^send: rows has 3 numbers for 1 tensors: give one number for"),
        ([], "^send: rows has 0 numbers for 1 tensors: give one number for"),
        ([17], r"^send: rows\[0\] is 17, but the tensor has 16: give a"),
        ([1 << 40], r"^send: rows\[0\] is 1099511627776, but the tensor has 16: give a"),
    ):
        refuses(lambda rows=rows: w.lane.send(rows), fserver.ShapeError, text)
    for rows, text in (
        ([True], r"^send: rows\[0\] is True, want an int"),
        ([1.5], r"^send: rows\[0\] is 1.5, want an int"),
        (3, "^send: rows is 3, want "),
    ):
        refuses(lambda rows=rows: w.lane.send(rows), fserver.ConfigError, text)
    assert (DRIVER.launches, DRIVER.copies) == (0, 0)
    w.lane.send([4])  # it is still its turn


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_wrong_rows(driver: Forks, mode: str) -> None:
    over(driver, wrong_rows, mode)


class Closes:
    """A number of rows that closes the lane when it is read, as another thread may then."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def __index__(self) -> int:
        self.side.lane.close()
        return 1


def closed_by_rows(mode: str) -> None:
    w, _ = pair(mode)
    refuses(lambda: w.lane.send([Closes(w)]), fserver.ClosedError, "^send: the channel is closed")
    assert (DRIVER.launches, DRIVER.copies) == (0, 0)


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_closed_while_rows_are_read(driver: Forks, mode: str) -> None:
    over(driver, closed_by_rows, mode)


def no_limit() -> None:
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


def test_no_limit(driver: Forks) -> None:
    """A time-out that is too large for nanoseconds is none, and not one of 0."""
    over(driver, no_limit)


def released(call: Callable[[], None]) -> None:
    """The call lets another Python thread go on while the driver waits."""

    def goes_on() -> None:
        while not DRIVER.waiting:
            time.sleep(0.001)
        DRIVER.waits = 0

    thread = threading.Thread(target=goes_on, daemon=True)
    DRIVER.waits = 1
    thread.start()
    call()
    thread.join()
    assert DRIVER.waited_in_vain == 0


def goes_on_while_the_gpu_is_busy() -> None:
    w, s = pair("copy")
    released(w.lane.close)
    assert s.lane.status() == (0, 0)
    flag, seq = (fserver.map_pinned_tensor(torch.zeros(1, dtype=torch.int64), 0) for _ in "12")
    released(lambda: fserver.wait_flag(flag, seq))
    released(lambda: fserver.seq_add_one(seq))
    released(lambda: fserver.write_flag(flag, seq))
    assert DRIVER.unloaded == 0


def test_threads_go_on_while_the_gpu_is_busy(driver: Forks) -> None:
    """What the GPU does may wait for one of them."""
    over(driver, goes_on_while_the_gpu_is_busy)


def put_off() -> None:
    at_rest()
    flag, seq = (fserver.map_pinned_tensor(torch.zeros(1, dtype=torch.int64), 0) for _ in "12")
    fserver.wait_flag(seq, seq)  # loads kernels, and has a page of pinned memory, for good
    before = DRIVER.held
    first, second = pair("copy"), pair("copy")
    for w, s in (first, second):
        exchange(w, s, 1)
    fserver.wait_flag(flag, seq)
    held = DRIVER.held
    DRIVER.waits = 1
    for side in first:
        side.lane.close()
    assert (DRIVER.waiting, DRIVER.waited_in_vain) == (0, 0)
    DRIVER.waits = 0
    assert before < DRIVER.held <= held
    exchange(*second, 2)
    for side in second:
        side.lane.close()
    assert DRIVER.held > before
    del seq
    time.sleep(0.05)
    assert DRIVER.held > before
    del flag
    end = time.monotonic() + WAIT
    while DRIVER.held > before and time.monotonic() < end:
        time.sleep(0.001)
    assert DRIVER.held == before


def test_memory_is_put_off(driver: Forks) -> None:
    """A lane gives nothing back while a stream of the process may wait for another lane, or
    for a flag: the driver would keep all others from the GPU until that wait is over."""
    over(driver, put_off)


def makes_room() -> None:
    stays = pair("copy")
    for side in pair("copy"):
        side.lane.close()
    made: list[tuple[Side, Side]] = []
    for what in ("full", "full_host"):
        setattr(DRIVER, what, 1)
        released(lambda: made.append(pair("copy")))
        assert getattr(DRIVER, what) == 0
    w, s = made[1]
    exchange(w, s, 1)
    told = {**s.plan.describe(0), "proof": ""}
    for again in (0, 1):
        DRIVER.taken = again
        x = Side(0, "copy", 10000, 64, 1)
        x.plan.attach(0, told)
        x.lane.close()
    assert DRIVER.taken == 0
    exchange(*stays, 2)


def test_what_is_put_off_makes_room(driver: Forks) -> None:
    """Where memory is short, and where it lies at addresses of a peer that are used again."""
    over(driver, makes_room)


def goes_on_while_a_stream_is_full(mode: str) -> None:
    w, s = pair(mode)
    for side, other in ((w, s), (s, w)):
        released(side.lane.send)
        released(other.lane.recv)
    assert DRIVER.missed == 0


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_threads_go_on_while_a_stream_is_full(driver: Forks, mode: str) -> None:
    """The driver waits then for the GPU, and that for a thread: of the other side, say."""
    over(driver, goes_on_while_a_stream_is_full, mode)


def in_two_threads(mode: str) -> None:
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
    assert closes.is_alive() and sends.is_alive()
    DRIVER.waits = 0  # as a kernel ends that has seen the word
    closes.join()
    sends.join()
    refuses(w.lane.send, fserver.ClosedError, "^send: the channel is closed")
    assert (s.lane.status(), DRIVER.waited_in_vain) == ((0, 0), 0)


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_in_two_threads(driver: Forks, mode: str) -> None:
    """A channel is of one thread at a time; another may close it, which waits for the call."""
    over(driver, in_two_threads, mode)


class ClosesLast:
    """Closes a lane when the interpreter ends, behind all that is registered for that."""

    def __init__(self, *sides: Side) -> None:
        self.sides, self.waits = sides, DRIVER._at("waits")

    def __del__(self) -> None:
        self.waits.value = 0
        self.sides[0].lane.close()


def busy_at_exit(mode: str) -> None:
    global LAST
    w, s = pair(mode)
    LAST = ClosesLast(w, s)
    DRIVER.waits = 1
    threading.Thread(target=w.lane.send, daemon=True).start()
    while not DRIVER.waiting:
        time.sleep(0.001)


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_busy_at_exit(driver: Forks, mode: str) -> None:
    """A thread that the interpreter has left behind never comes back from its call."""
    over(driver, busy_at_exit, mode)


def forked() -> None:
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


def test_a_child_of_fork_leaves_the_channel_alone(driver: Forks) -> None:
    """Whatever of its memory the two share."""
    over(driver, forked)


def odd_words() -> None:
    def word() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)

    def lost() -> torch.Tensor:
        t = word()
        t.untyped_storage().resize_(0)
        return t

    extension = _loader.load()
    for tensor, text in (
        (lost(), "set_word: word has lost its memory"),
        (word().to_sparse(), r"set_word: word has layout sparse: pass word.to_dense\(\)"),
        (word()._neg_view(), r"set_word: word is a negated view: pass word.resolve_neg\(\)"),
    ):
        refuses(lambda t=tensor: extension.set_word(t, 1), fserver.ConfigError, text)
    for i in (2, 128, 256, 2**40):  # not a number of 8 bits of it
        text = f"^map_pinned_tensor: device_index is {i}, want 0 to 1"
        refuses(lambda i=i: fserver.map_pinned_tensor(word(), i), fserver.ConfigError, text)
    DRIVER.gpus_shown = 0
    text = "^map_pinned_tensor: CUDA shows no GPU .see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    refuses(lambda: fserver.map_pinned_tensor(word(), 0), fserver.ConfigError, text)
    DRIVER.gpus_shown = 2
    seen = fserver.map_pinned_tensor(word(), 0)
    text = r"^map_pinned_tensor: tensor is on cuda:0, want a CPU tensor .*pin_memory\(\)"
    refuses(lambda: fserver.map_pinned_tensor(seen, 1), fserver.ConfigError, text)


def test_odd_words(driver: Forks) -> None:
    over(driver, odd_words)


def old() -> None:
    DRIVER.old = 1
    word = torch.zeros(1, dtype=torch.int64)
    for name, call in (
        ("map_pinned_tensor", lambda: fserver.map_pinned_tensor(word, 0)),
        ("channel", lambda: pair("copy")),
    ):
        text = f"^{name}: cannot use a GPU: this driver supports CUDA 11.6, want 11.7 or later "
        refuses(call, fserver.ConfigError, text + r"\(install an NVIDIA driver for CUDA 11.7")


def test_old_driver(driver: Forks) -> None:
    """Neither channels nor flags use it."""
    over(driver, old)


def no_pinned_memory() -> None:
    w, _ = pair("copy")
    DRIVER.fail_host = 1
    text = "allocate pinned memory: out of memory .*open fewer channels, or raise ulimit -l"
    refuses(lambda: w.lane.peek(w.plan.arena, 64), fserver.Error, text)
    refuses(lambda: pair("copy"), fserver.Error, text)


def test_no_pinned_memory(driver: Forks) -> None:
    over(driver, no_pinned_memory)


def no_memory(mode: str, what: str, who: str) -> None:
    on_gpus()
    pair = open_cluster()
    exchanged(*opened(pair, "host", "before"), 1)
    before = at_rest()
    setattr(DRIVER, what, 1 if who == "worker" else 2)
    errors = dict(zip(("worker", "server"), opened(pair, mode, "none"), strict=True))
    mine = errors.pop(who)
    (told,) = errors.values()
    assert type(mine) is fserver.Error
    assert "out of memory" in str(mine) and REMEDIES[what] in str(mine)
    assert f"{who} 0 refuses: {mine}" in str(told)
    assert DRIVER.held == before
    setattr(DRIVER, what, 0)
    w, s = opened(pair, mode, "none")  # its name and its keys are free
    if mode == "copy":
        exchanged(w, s, 2)
    pair.close()
    assert DRIVER.held == before


REMEDIES = {
    "fail_alloc": "torch.cuda.empty_cache()",
    "fail_host": "open fewer channels, or raise ulimit -l",
    "fail_load": "torch.cuda.empty_cache()",
    "fail_stream": "torch.cuda.empty_cache()",
}


@pytest.mark.parametrize("who", ["worker", "server"])
@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("kernel", "fail_load"),
        *(("copy", what) for what in ("fail_alloc", "fail_host", "fail_stream")),
    ],
)
def test_no_memory(driver: Forks, mode: str, what: str, who: str) -> None:
    """One side has none: both say so, nothing is kept, and the next channel opens."""
    over(driver, no_memory, mode, what, who)


def without_access(mode: str) -> None:
    """Of one process, and of two."""
    on_gpus()
    pair = open_cluster()
    before = at_rest()
    DRIVER.no_access = 1
    for mine, error in zip((0, 1), opened(pair, mode, "none"), strict=True):
        assert type(error) is fserver.ConfigError, error
        assert f"gpu {mine} cannot use the memory of gpu {1 - mine}: no peer access" in str(error)
        assert 'use mode="host"' in str(error)
    assert DRIVER.held == before
    w, s = opened(pair, "host", "none")  # as it says
    exchanged(w, s, 1)
    pair.close()

    w, s = (Side(i, mode, 10000, 64, 1) for i in (0, 1))
    told = {**s.plan.describe(0), "device": 5, "proof": ""}
    DRIVER.fail_import = UNSUPPORTED
    refuses(
        lambda: w.plan.attach(0, told),
        fserver.ConfigError,
        "gpu 0 cannot use the memory of gpu 5 of peer 0, as its process counts: no peer access .*"
        'use mode="host"',
    )
    w.lane.close()
    s.lane.close()
    assert DRIVER.held == before


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_gpus_without_peer_access(driver: Forks, mode: str) -> None:
    over(driver, without_access, mode)


def beside_a_capture(mode: str) -> None:
    open_before = pair(mode)
    DRIVER.captures = 1
    open_now = pair(mode)
    if mode == "copy":
        exchange(*open_now, 1)  # and its threads look at the words
    for side in (*open_before, *open_now):
        side.lane.peek(side.plan.arena, 64)
        side.lane.finish()
    open_now[0].lane.close()
    del open_now, side  # and closed by that
    for side in open_before:
        side.end(ENDED)
    time.sleep(0.1)  # the threads fill the flags
    for side in open_before:
        side.lane.close()
    assert DRIVER.spoiled == 0


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_beside_a_capture(driver: Forks, mode: str) -> None:
    """What opens and closes a channel does no harm to a capture that another thread makes in
    torch's default mode."""
    over(driver, beside_a_capture, mode)


def test_late_peer(driver: Forks) -> None:
    over(driver, late)


@pytest.mark.parametrize("how", ["one", "both", "later", "full", "stream"])
def test_late_peer_while_others_wait(driver: Forks, how: str) -> None:
    over(driver, late_behind_others, how)


@pytest.mark.parametrize("check", [one_context, no_context, context_of_a_holder])
def test_one_context_ends_all_waits(driver: Forks, check: Callable[[], None]) -> None:
    over(driver, check)


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_ended(driver: Forks, mode: str) -> None:
    over(driver, ended, mode)


if __name__ == "__main__":
    DRIVER = Driver()
    globals()[sys.argv[1]](*sys.argv[2:])
    assert DRIVER.with_gil == 0
    print("checked")
