"""Channels of GPU tensors that the engine carries, with a thread in place of a CUDA stream: what is
enqueued, captured and replayed, and what the engine makes of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nodes import LIMIT, Child, Cluster, Parent, eventually, in_thread, together
from streams import Stream, Work, done, void

import fserver
from fserver import _loader
from fserver.channel import opening
from fserver.channel.stream import Gpu, StreamSide, sweep

MakeCluster = Callable[..., Cluster]


class FakeCall:
    """HostCall, with memory of the CPU."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.first: list[Work] = []
        self.waits: list[Work] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.last: list[Work] = []

    def ring(self, count: torch.Tensor, flag: torch.Tensor, last: bool) -> None:
        def ring() -> None:
            count.add_(1)
            flag.copy_(count)

        (self.last if last else self.first).append(ring)

    def wait(self, count: torch.Tensor, add: int, asked: torch.Tensor, done: torch.Tensor) -> None:
        def until() -> None:
            count.add_(add)
            asked.copy_(count)
            while int(done) < int(count):
                time.sleep(0.0001)

        self.waits.append(until)

    def copy(self, to: torch.Tensor, what: torch.Tensor) -> None:
        self.copies.append((to, what))

    def run(self, sizes: list[int] | None) -> int:
        works = self.first + self.waits
        for i, (to, what) in enumerate(self.copies):
            n = what.nbytes if sizes is None else sizes[i]
            if n:
                to, what = (t.reshape(-1).view(torch.uint8)[:n] for t in (to, what))
                works = [*works, lambda to=to, what=what: void(to.copy_(what))]
        for work in works + self.last:
            self.stream.put(work)
        return 0


class FakeGpu:
    """Gpu, with memory of the CPU."""

    captured = False
    graphs = 0

    def __init__(self, stream: Stream) -> None:
        self.stream, self.entered = stream, ""

    def alone(self, call: str, do: Callable[..., None], *args: Any) -> None:
        if self.entered:
            raise fserver.ConfigError(f"{call}: another thread is in a call")
        self.entered = call
        try:
            do(*args)
        finally:
            self.entered = ""

    def host(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(like)

    like = host

    def zeros(self, n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int64)

    def flag(self, word: torch.Tensor) -> torch.Tensor:
        return word

    def settle(self) -> None:
        pass

    call = Gpu.call

    def _host_call(self, name: str) -> FakeCall:
        return FakeCall(self.stream)

    def fill(self, words: torch.Tensor, values: list[int]) -> None:
        self.stream.put(lambda: void(words.copy_(torch.tensor(values))))

    def idle(self) -> bool:
        return not self.entered and self.stream.over(0)

    def unused(self) -> bool:
        return self.idle() and not self.graphs

    def finished(self, seconds: float) -> bool:
        return self.stream.over(seconds)


class TwoStreams(FakeGpu):
    """With what a HostCall finds out about its streams."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self.current, self.capturing = "first", False
        self._last = ""

    def _host_call(self, name: str) -> FakeCall:
        call = FakeCall(self.stream)
        enqueue = call.run

        def run(sizes: list[int] | None) -> int:
            if self.capturing:
                return max(1, enqueue(sizes))
            if self._last not in ("", self.current) and not self.stream.over(0):
                return 2
            self._last = self.current
            return enqueue(sizes)

        call.run = run  # type: ignore[method-assign]
        return call


class On:
    """Has channels be those of a stream, for the thread that opens them."""

    gpu = FakeGpu
    direct = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: dict[str, Stream] = {}
        self._of: dict[int, Stream] = {}
        monkeypatch.setattr(opening, "_streams", lambda device: True)
        monkeypatch.setattr(opening, "Gpu", lambda device: self.gpu(self._mine()))
        monkeypatch.setattr(opening, "StreamSide", self._side)

    def stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream())

    def _mine(self) -> Stream:
        return self.stream(threading.current_thread().name)

    def _side(self, *args: Any) -> StreamSide:
        *rest, _, timeout_ms = args
        return StreamSide(*rest, self.direct, timeout_ms)


# Whether peers write to the tensors themselves.
both = pytest.mark.parametrize("on", [False, True], ids=["copied", "direct"], indirect=True)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[On]:
    one = On(monkeypatch)
    one.direct = getattr(request, "param", False)
    yield one
    for stream in one.streams.values():
        stream.close()


def opened(
    on: On,
    pair: Cluster,
    push: list[torch.Tensor],
    pull: list[torch.Tensor],
    back: list[torch.Tensor] | None = None,
    timeout_ms: float = LIMIT * 1e3,
    name: str = "it",
) -> tuple[Any, Any, Stream, Stream]:
    push_keys, pull_keys = list(range(len(push))), list(range(100, 100 + len(pull)))
    back = [torch.empty_like(t) for t in pull] if back is None else back

    def named(who: str, work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            threading.current_thread().name = who
            return work()

        return run

    options: dict[str, Any] = {"timeout_ms": timeout_ms, "name": name}
    calls = [
        named("w", lambda: pair.worker.channel(push, push_keys, pull, pull_keys, **options)),
        named("s", lambda: pair.server.channel(push_keys, back, pull_keys, **options)),
    ]
    # A short limit holds for the opening too, and a busy host can exceed it.
    for _ in range(20):
        futures = [in_thread(call) for call in calls]
        if not any(isinstance(f.exception(LIMIT), fserver.TimeoutError) for f in futures):
            break
        together([f.result().close for f in futures if not f.exception()])
    w, s = (future.result() for future in futures)
    return w, s, on.stream("w"), on.stream("s")


def test_rows_in_graphs(cluster: MakeCluster, on: On) -> None:
    """A graph sends the rows that it was captured with, whatever was sent before."""
    x, y = torch.zeros(8, 4), torch.zeros(8, 4)
    w, s, at_worker, at_server = opened(on, cluster(), [x], [y])
    [[got]] = s.tensors

    def exchange(run: Callable[[], None]) -> tuple[list[int], int]:
        x.add_(1)
        got.fill_(-1)
        run()
        s.recv()
        s.send()
        done(at_worker, at_server)
        return s.rows[0].tolist(), int((got[:, 0] == x[0, 0]).sum())

    def call(rows: list[int] | None = None) -> None:
        w.send(rows)
        w.recv()

    with at_worker.capture() as whole:
        call()
    with at_worker.capture() as half:
        call([4])
    for _ in range(2):
        assert exchange(lambda: at_worker.replay(whole)) == ([8], 8)
        assert exchange(lambda: call([2])) == ([2], 2)
        assert exchange(lambda: at_worker.replay(whole)) == ([8], 8)
        assert exchange(lambda: at_worker.replay(half)) == ([4], 4)
        assert exchange(call) == ([8], 8)
        assert exchange(lambda: at_worker.replay(half)) == ([4], 4)
        assert exchange(lambda: at_worker.replay(whole)) == ([8], 8)
    together([w.close, s.close])


@both
def test_opened_in_inference_mode(pair: Cluster, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a side is written outside of it, too."""
    for node in (pair.worker, pair.server):
        inside = torch.inference_mode()(node.channel)
        monkeypatch.setattr(node, "channel", inside)
    x, y = torch.zeros(8, 4), torch.zeros(8, 4)
    w, s, at_worker, at_server = opened(on, pair, [x], [y])
    for rows in ([8], [3], [5]):
        x.add_(1)
        w.send(rows)
        s.recv()
        at_server.put(lambda: void(s.outgoing[0].copy_(s.tensors[0][0])))
        s.send(rows)
        w.recv()
        done(at_worker, at_server)
        assert s.rows[0].tolist() == w.rows[0].tolist() == rows
        assert torch.equal(y[: rows[0]], x[: rows[0]])


def test_turns_in_graphs(cluster: MakeCluster, on: On) -> None:
    """A graph may have one of the two calls alone, and a capture may fail between them."""
    on.gpu = TwoStreams
    x, y = torch.zeros(8, 4), torch.zeros(8, 4)
    w, s, at_worker, at_server = opened(on, cluster(), [x], [y])
    with pytest.raises(fserver.ConfigError, match="^recv: call send"):
        w.recv()
    w._side._gpu.capturing = True
    with at_worker.capture() as sends:
        w.send()
    w._side._gpu.capturing = False
    for i in range(3):
        x.fill_(i)
        at_worker.replay(sends)
        w.recv()
        s.recv()
        s.send()
        done(at_worker, at_server)
        assert s.tensors[0][0].eq(i).all()
    w.send()
    w.recv()
    s.recv()
    s.send()
    done(at_worker, at_server)
    together([w.close, s.close])


def test_two_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that look at closed sides at the same time let go of each once."""
    both = threading.Barrier(2)
    forgotten: list[int] = []

    class Kept:
        class _gpu:
            @staticmethod
            def unused() -> bool:
                both.wait(LIMIT)
                return True

        def _word(self, which: int) -> int:
            return 1

        def _forget(self) -> None:
            forgotten.append(1)

    monkeypatch.setattr("fserver.channel.stream._kept", [Kept()])
    together([sweep, sweep])
    assert forgotten == [1]


def test_second_thread(cluster: MakeCluster, on: On, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that calls while another is between two parts of its send() is refused. A side that is
    closed then keeps what that send() uses."""
    pair = cluster(transport="cma")
    w, s, _, _ = opened(on, pair, [torch.ones(4, 8)], [torch.ones(4, 8)])
    inside, go = threading.Event(), threading.Event()
    fill = FakeGpu.fill

    def slow(*args: Any) -> None:
        inside.set()
        assert go.wait(LIMIT)
        fill(*args)

    monkeypatch.setattr(FakeGpu, "fill", slow)
    sender = threading.Thread(target=w.send, args=([2],))
    sender.start()
    assert inside.wait(LIMIT)
    with pytest.raises(fserver.ConfigError, match="another thread is in a call"):
        w.send()
    side = w._side
    together([w.close, s.close])
    sweep()
    assert side._send and side._out
    go.set()
    sender.join(LIMIT)
    assert not sender.is_alive()
    done(on.stream("w"))
    sweep()
    assert not side._out
    with pytest.raises(fserver.Error, match="closed"):
        side.send()


@both
def test_replayed_after_close(pair: Cluster, on: On) -> None:
    """What a graph names lives as long as the graph, and the replay waits for nobody."""
    x, y = torch.ones(4, 8), torch.ones(4, 8)
    w, s, at_worker, at_server = opened(on, pair, [x], [y])
    with at_worker.capture() as graph:
        w.send()
        w.recv()
    w._side._gpu.graphs = 1
    at_worker.replay(graph)
    s.recv()
    s.send()
    done(at_worker, at_server)
    together([w.close, s.close])
    gpu, side = w._side._gpu, weakref.ref(w._side)
    words = [weakref.ref(t) for t in (w._side._words, *w._side._sent, *w._side._received)]
    del w
    at_worker.replay(graph)
    done(at_worker)
    gc.collect()
    sweep()
    assert all(word() is not None for word in words)
    gpu.graphs = 0
    eventually(lambda: sweep() or side() is None)


@both
@pytest.mark.parametrize("way", ["tcp", "cma"])
def test_replayed(cluster: MakeCluster, on: On, way: str) -> None:
    """61 layers x 3 stages in a graph on both sides, with data that changes, beside calls that are
    not captured."""
    pair = cluster(transport=way)
    x, y = torch.zeros(7, 64), torch.zeros(7, 128)
    w, s, at_worker, at_server = opened(on, pair, [x], [y])
    assert (w.path, s.path) == ("host", "host")
    [[seen]] = s.tensors
    wrong: list[str] = []
    turn = torch.zeros(1)

    def check(good: bool, what: str) -> None:
        if not good:
            wrong.append(f"{what} in turn {int(turn)}")

    def worker() -> None:
        at_worker.put(lambda: void(turn.add_(1)))
        at_worker.put(lambda: void(x.fill_(turn.item())))
        w.send()
        at_worker.put(lambda: void(x.fill_(-1)))  # what was sent has been read
        w.recv()
        at_worker.put(
            lambda: check(bool((y[:, :64] == turn).all() and (y[:, 64:] == 2 * turn).all()), "y")
        )

    def server() -> None:
        s.recv()
        at_server.put(lambda: void(s.outgoing[0].copy_(torch.cat([seen, seen * 2], 1))))
        s.send()
        at_server.put(lambda: void(s.outgoing[0].fill_(-1)))

    for _ in range(3):
        worker()
        server()
    with at_worker.capture() as a:
        for _ in range(61 * 3):
            worker()
    with at_server.capture() as b:
        for _ in range(61 * 3):
            server()
    for _ in range(3):
        at_worker.replay(a)
        at_server.replay(b)
    worker()
    server()
    done(at_worker, at_server)
    assert not wrong and int(turn) == 4 + 3 * 183
    assert w.rows[0].tolist() == s.rows[0].tolist() == [7]
    w.check()
    s.check()


def test_two_streams(pair: Cluster, on: On) -> None:
    """A channel that is in use on one is refused on another, until that is over."""
    on.gpu = TwoStreams
    x, y = torch.zeros(4), torch.zeros(4)
    w, s, at_worker, at_server = opened(on, pair, [x], [y])
    gpu, release = w._side._gpu, threading.Event()

    def held() -> None:
        release.wait(LIMIT)

    try:
        at_worker.put(held)
        for call in (w.send, w.recv):
            gpu.current = "first"
            call()
            gpu.current = "second"
            other = "recv" if call == w.send else "send"
            text = (
                f"^{other}: the channel is still in use on another stream .synchronize that stream"
            )
            with pytest.raises(fserver.ConfigError, match=text):
                getattr(w, other)()
        gpu.capturing = True  # nothing can be asked then
        with at_worker.capture():
            w.send()
            w.recv()
        gpu.capturing = False
    finally:
        release.set()
    s.recv()
    s.send()
    done(at_worker, at_server)
    for call in (w.send, s.recv, s.send, w.recv):
        call()
    done(at_worker, at_server)
    w.check()
    s.check()


def test_a_refused_send_leaves_the_rows(
    pair: Cluster, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the message that another stream has not sent yet."""
    on.gpu = TwoStreams
    x, release = torch.zeros(8, 4), threading.Event()
    w, s, at_worker, at_server = opened(on, pair, [x], [])
    gpu = w._side._gpu
    at_worker.put(lambda: void(release.wait(LIMIT)))
    try:
        w.send([3])
        gpu.current = "second"  # which has nothing to do
        monkeypatch.setattr(gpu, "fill", lambda to, what: void(to.copy_(torch.tensor(what))))
        with pytest.raises(fserver.ConfigError, match=r"^send: the channel is still in use"):
            w.send([5])
    finally:
        release.set()
    s.recv()
    done(at_worker, at_server)
    assert s.rows[0].tolist() == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by", ["close", "gc"])
def test_memory_of_a_gpu_that_does_not_say_that_it_is_done(
    pair: Cluster, on: On, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A capture, or an error of the GPU, forbids to ask: the memory stays."""
    monkeypatch.setattr("fserver.channel.stream._unfinished", kept := list[Any]())
    w, s, *_ = opened(on, pair, [torch.zeros(4)], [torch.zeros(4)])

    def finished(seconds: float) -> bool:
        raise fserver.Error("a stream is being captured")

    monkeypatch.setattr(w._side._gpu, "finished", finished)
    side = weakref.ref(w._side)
    if by == "close":
        with pytest.raises(fserver.Error, match="a stream is being captured"):
            w.close()
    del w
    gc.collect()
    assert side() is not None and kept == [side()]
    s.close()


@both
def test_rows_and_dtypes(pair: Cluster, on: On) -> None:
    push = [torch.arange(24.0).reshape(8, 3), torch.tensor(7, dtype=torch.int16), torch.ones(0, 2)]
    pull = [torch.empty_like(t) for t in push]
    back = [t.clone() for t in push]
    w, s, at_worker, at_server = opened(on, pair, push, pull, back)
    for rows in ([8, 1, 0], [3, 1, 0], [0, 0, 0], [8, 1, 0]):
        s.recv()
        w.send(rows)
        s.send([rows[0] // 2, rows[1], 0])
        w.recv()
        done(at_worker, at_server)
        assert s.rows[0].tolist() == rows
        assert w.rows[0].tolist() == [rows[0] // 2, rows[1], 0]
        assert torch.equal(s.tensors[0][0][: rows[0]], push[0][: rows[0]])
    assert torch.equal(pull[0][:4], back[0][:4]) and pull[1] == 7
    with pytest.raises(fserver.ShapeError, match=r"rows\[0\] is 9"):
        w.send([9, 1, 0])


@both
def test_one_way(pair: Cluster, on: On) -> None:
    """Nothing is overwritten before it has been read, however far a stream is ahead."""
    x = torch.zeros(1000)
    w, s, at_worker, at_server = opened(on, pair, [x], [])
    seen: list[float] = []
    for i in range(50):
        at_worker.put(lambda i=i: void(x.fill_(i)))
        w.send()
    for _ in range(50):
        s.recv()
        at_server.put(lambda: time.sleep(0.001))  # the next message may come meanwhile
        at_server.put(lambda: seen.append(s.tensors[0][0].sum().item()))
    done(at_worker, at_server)
    assert seen == [1000.0 * i for i in range(50)]
    y, z = torch.zeros(9), torch.zeros(9)
    w2, s2, *_ = opened(on, pair, [], [y], [z], name="back")
    got: list[float] = []
    for i in range(20):
        at_server.put(lambda i=i: void(z.fill_(i)))
        s2.send()
    for _ in range(20):
        w2.recv()
        at_worker.put(lambda: got.append(y[0].item()))
    done(at_worker, at_server)
    assert got == list(range(20))


@both
@pytest.mark.parametrize("to", ["worker", "server"])
def test_one_way_with_both_calls(pair: Cluster, on: On, to: str) -> None:
    """With nothing to send or to receive, a call enqueues nothing."""
    x, y = torch.zeros(9), torch.zeros(9)
    back = to == "worker"
    tensors = ([], [y], [x]) if back else ([x], [], [])
    w, s, at_worker, at_server = opened(on, pair, *tensors)
    [seen] = w.incoming + s.incoming
    sender, receiver = (s, w) if back else (w, s)
    at_sender, at_receiver = (at_server, at_worker) if back else (at_worker, at_server)
    got: list[float] = []

    def send() -> None:
        at_sender.put(lambda: void(x.add_(1)))
        for call in (sender.recv, sender.send) if back else (sender.send, sender.recv):
            call()

    def receive() -> None:
        for call in (receiver.send, receiver.recv) if back else (receiver.recv, receiver.send):
            call()
        at_receiver.put(lambda: got.append(seen.sum().item()))

    for _ in range(10):
        send()
        receive()
    with at_sender.capture() as a:
        send()
    with at_receiver.capture() as b:
        receive()
    for _ in range(10):
        at_sender.replay(a)
        at_receiver.replay(b)
    done(at_worker, at_server)
    assert got == [9.0 * i for i in range(1, 21)]


@both
@pytest.mark.parametrize("plain", ["w", "s"])
def test_other_side_on_the_cpu(
    pair: Cluster, on: On, monkeypatch: pytest.MonkeyPatch, plain: str
) -> None:
    """A side of CPU tensors names no keys by which messages land, and asks for none."""
    monkeypatch.setattr(
        opening, "_streams", lambda device: threading.current_thread().name != plain
    )
    x, y = torch.zeros(100), torch.zeros(50)
    w, s, *_ = opened(on, pair, [x], [y])
    for i in range(3):
        x.fill_(i)
        s.outgoing[0].fill_(i + 0.5)
        together([lambda: (w.send(), w.recv()), lambda: (s.recv(), s.send())])
        done(*on.streams.values())
        assert s.tensors[0][0].eq(i).all() and y.eq(i + 0.5).all()
    together([w.close, s.close])


def test_close_sends_what_is_enqueued(pair: Cluster, on: On) -> None:
    x = torch.ones(100)
    w, s, at_worker, at_server = opened(on, pair, [x], [])
    at_worker.put(lambda: time.sleep(0.2))
    at_worker.put(lambda: void(x.fill_(2)))
    s.recv()
    w.send()
    w.close()
    done(at_server)
    assert s.tensors[0][0].tolist() == [2] * 100
    s.close()
    for call in (w.send, s.recv):
        with pytest.raises(fserver.ClosedError):
            call()


def test_time_out(pair: Cluster, on: On) -> None:
    """Counts from when the stream waits, and ends the wait."""
    w, s, at_worker, at_server = opened(on, pair, [torch.ones(1)], [torch.empty(1)], timeout_ms=300)
    time.sleep(0.6)  # nobody waits
    w.check()
    s.check()
    w.send()
    time.sleep(0.6)
    w.check()
    w.recv()
    done(at_worker)
    for call in (w.check, w.send):
        with pytest.raises(fserver.TimeoutError, match="no message came within timeout_ms=300,"):
            call()
    w.close()
    s.close()
    eventually(lambda: sweep() or w._side._out == s._side._out == [])  # nobody uses them


@pytest.mark.parametrize("first", ["worker", "server"])
def test_peer_closes(pair: Cluster, on: On, first: str) -> None:
    """A stream that waits for a side that closes goes on. An error that is kept keeps no tensor."""
    w, s, *streams = opened(on, pair, [torch.ones(1)], [torch.empty(1)])
    if first == "server":
        w.send()
        w.recv()
        closes, stays = s, w
    else:
        s.recv()
        closes, stays = w, s
    closes.close()
    done(*streams)
    errors = []
    for call in (stays.check, stays.send):
        with pytest.raises(fserver.ClosedError, match="closed its side") as caught:
            call()
        errors.append(caught.value)
    tensors = [weakref.ref(t) for t in (*stays.outgoing, *stays.incoming)]
    stays.close()
    assert len(tensors) == 2 and not any(t() is not None for t in tensors)


def test_sent_to_who_has_closed(pair: Cluster, on: On) -> None:
    """The call says so, not the next one."""
    w, s, *streams = opened(on, pair, [torch.ones(1)], [torch.empty(1)])
    for call in (w.send, s.recv, s.send, w.recv):
        call()
    done(*streams)
    s.close()
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            w.check()
        except fserver.ClosedError:
            break
    with pytest.raises(fserver.ClosedError, match="closed its side"):
        w.send()
    w.close()


LEFT_OPEN = """
import pytest, torch, nodes, test_channel_stream as t
on = t.On(pytest.MonkeyPatch())
pair = nodes.open_cluster()
w, s, at_worker, at_server = t.opened(on, pair, [torch.ones(1)], [torch.empty(1)])
w.send()
w.recv()
print("open", flush=True)
"""


LEFT_ASKING = """
import pytest, nodes, test_notify as t
from fserver.notify import Notify

pair = nodes.open_cluster()
around = t.waiting(pytest.MonkeyPatch())
around.__enter__()
notify = Notify(pair.worker.wait, pair.server.get_batch)
notify.init()
notify.block_now_stream_and_get_batch()
print("open", flush=True)
"""


@pytest.mark.parametrize("program", [LEFT_OPEN, LEFT_ASKING], ids=["channel", "notify"])
def test_process_ends_with_a_stream_that_waits(program: str) -> None:
    """In an interpreter of its own, because that has to end as any does."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", f"import signal\nsignal.alarm(60)\n{program}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        opened, start = process.stdout.readline(), time.monotonic()
        out, err = process.communicate()
    assert (process.returncode, opened, out, err) == (0, "open\n", "", "")
    assert time.monotonic() - start < LIMIT


def test_words() -> None:
    extension = _loader.load()
    word = torch.zeros(1, dtype=torch.int64)
    extension.set_word(word, 7)
    assert word.item() == 7
    for bad in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), None):
        with pytest.raises(fserver.ConfigError, match="set_word: word"):
            extension.set_word(bad, 1)


def worker_process(parent: Parent, scheduler: str) -> None:
    with fserver.Worker(scheduler=scheduler, settings={"FSERVER_LOG": "error"}) as w:
        x, y = torch.ones(1000), torch.empty(1000)
        ch = w.channel([x], [0], [y], [100], name="it")
        parent.put("open")
        while True:
            ch.send()
            ch.recv()


def test_killed(child: Callable[..., Child], on: On) -> None:
    """A stream that waits for a peer that dies goes on; a side of CPU tensors fits one of a
    stream."""
    server = fserver.Server(
        scheduler="127.0.0.1:0",
        host_scheduler=True,
        connect=False,
        settings={"FSERVER_LOG": "error"},
    )
    stream = on.stream(threading.current_thread().name)
    try:
        worker = child(worker_process, server.scheduler)
        server.connect()
        ch = server.channel([0], [torch.empty(1000)], [100], timeout_ms=LIMIT * 1e3, name="it")
        assert worker.get() == "open"
        for _ in range(20):
            ch.recv()
            stream.put(lambda: void(ch.outgoing[0].copy_(ch.tensors[0][0])))
            ch.send()
        done(stream)
        worker.kill()
        with pytest.raises(fserver.PeerLostError) as caught:
            while True:
                ch.recv()
                ch.send()
                done(stream)
        assert (caught.value.role, caught.value.rank) == ("worker", 0)
        with pytest.raises(fserver.PeerLostError):
            ch.check()
        ch.close()
        done(stream)
    finally:
        server.close()


def test_nobody_closes(pair: Cluster, on: On) -> None:
    w, s, *_ = opened(on, pair, [torch.ones(1)], [torch.empty(1)])
    words = [c._side._words for c in (w, s)]
    del w, s
    for word in words:
        eventually(lambda word=word: word[8] == 2**63 - 1 and word[10] == 1)  # done and over
