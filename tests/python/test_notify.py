"""SimpleNotify, with a thread in place of a CUDA stream."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from nodes import Cluster
from streams import Stream, done, void

import fserver
from fserver import _loader, fserver_lib
from fserver import notify as notifying

MakeCluster = Callable[..., Cluster]


class Seen:
    """What map_pinned_tensor gives."""

    def __init__(self, flag: torch.Tensor, gpu: int) -> None:
        self.flag, self.gpu = flag, gpu


@contextlib.contextmanager
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The stream that SimpleNotify has wait."""
    stream = Stream()

    def wait_value(seen: Seen, value: int) -> None:
        assert seen.gpu == stream.gpu  # or the engine does not know who waits

        def until() -> None:
            while int(seen.flag) < value:
                time.sleep(0.0001)

        stream.put(until)

    set_word = _loader.load().set_word
    calls = SimpleNamespace(wait_value=wait_value, map_pinned_tensor=Seen, set_word=set_word)
    monkeypatch.setattr(notifying, "_loader", SimpleNamespace(load=lambda: calls))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: stream.gpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield stream
    stream.close()


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    with waiting(monkeypatch) as stream:
        yield stream


def test_notify_of_requests(
    pair: Cluster, current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fserver_lib, "_node", pair.worker)
    notify = fserver.SimpleNotify()
    notify.init()
    notify.init()
    notify.wait_event_done()  # of nothing
    x, y = torch.zeros(1000), torch.empty(1000)
    before, after = torch.empty(1000), torch.empty(1000)
    for i in range(5):
        current.gpu = i % 2
        x.fill_(i)
        y.fill_(-1)
        notify.block_now_stream()  # what was asked for last is there: until the next
        current.put(lambda: void(before.copy_(y)))
        h = pair.worker.push_pull([x], [0], [y], [0])
        notify.stream_wait_event(h)
        notify.block_now_stream()  # until the same
        current.put(lambda: void(after.copy_(y)))
        assert not current.over(0.02)
        [(handler, [seen], _)] = pair.server.get_batch()
        pair.server.respond([seen * 2], handler)
        notify.wait_event_done()
        done(current)
        assert before.tolist() == after.tolist() == [2 * i] * 1000


def test_notify_of_batches(pair: Cluster, current: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, got = torch.zeros(1000), torch.zeros(1000)
    pair.server.register_recv_buffer(buffer, [0], [0])
    monkeypatch.setattr(fserver_lib, "_node", pair.server)
    notify = fserver.SimpleNotify()
    notify.init()
    x, y = torch.zeros(1000), torch.empty(1000)
    for i in range(5):
        notify.block_now_stream_and_get_batch()
        current.put(lambda: void(torch.mul(buffer, 2, out=got)))
        assert not current.over(0.02)
        h = pair.worker.push_pull([x.fill_(i)], [0], [y], [0])
        [(handler, [seen], keys)] = notify.get_future_batch_data()
        assert (seen.data_ptr(), keys) == (buffer.data_ptr(), [0])
        done(current)
        pair.server.respond([got], handler)
        pair.worker.wait(h)
        assert y.tolist() == [2 * i] * 1000


def test_notify_of_failures(
    pair: Cluster, current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream goes on, whoever asks is told, and what is asked for next is waited for."""
    monkeypatch.setattr(fserver_lib, "_node", pair.worker)
    notify = fserver.SimpleNotify()
    for call in ("block_now_stream", "block_now_stream_and_get_batch"):
        with pytest.raises(fserver.ConfigError, match=rf"^{call}: call init\(\) first"):
            getattr(notify, call)()
    with pytest.raises(fserver.ConfigError, match=r"^stream_wait_event: call init\(\) first"):
        notify.stream_wait_event(0)
    with pytest.raises(fserver.ConfigError, match="no batch has been asked for"):
        notify.get_future_batch_data()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(fserver.ConfigError, match=r"^SimpleNotify.init: torch sees no GPU"):
            notify.init()

    def refuse_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_thread)
        with pytest.raises(RuntimeError, match="start new thread"):
            notify.init()
    notify.init()

    def good() -> None:
        x, y = torch.ones(10), torch.zeros(10)
        notify.stream_wait_event(pair.worker.push_pull([x], [0], [y], [0]))
        current.put(lambda: void(y.add_(1)))
        assert not current.over(0.02)
        [(handler, [seen], _)] = pair.server.get_batch()
        pair.server.respond([seen * 2], handler)
        notify.wait_event_done()
        done(current)
        assert y.tolist() == [3] * 10

    good()
    notify.stream_wait_event(99)
    with pytest.raises(fserver.ConfigError, match="handler 99 is not known"):
        notify.wait_event_done()
    done(current)
    notify.block_now_stream_and_get_batch()
    with pytest.raises(fserver.ConfigError, match="get_batch: this process is a worker"):
        notify.get_future_batch_data()
    done(current)

    def refuse(flag: torch.Tensor, value: int) -> None:
        raise fserver.ConfigError("the current stream is being captured")

    with monkeypatch.context() as patch:
        patch.setattr(notifying._loader, "load", lambda: SimpleNamespace(wait_value=refuse))
        for wait in (lambda: notify.stream_wait_event(0), notify.block_now_stream):
            with pytest.raises(fserver.ConfigError, match="being captured"):
                wait()
    good()


def test_notify_follows_the_node(
    cluster: MakeCluster, current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One made between an init() and its stop() is of use after the next init()."""
    pairs = [cluster(), cluster()]
    monkeypatch.setattr(fserver_lib, "wait", pairs[0].worker.wait)  # as init() does
    notify = fserver.SimpleNotify()
    notify.init()
    monkeypatch.setattr(fserver_lib, "wait", pairs[1].worker.wait)
    pairs[0].close()
    y = torch.zeros(10)
    notify.stream_wait_event(pairs[1].worker.push_pull([torch.ones(10)], [0], [y], [0]))
    [(handler, tensors, _)] = pairs[1].server.get_batch()
    pairs[1].server.respond(tensors, handler)
    notify.wait_event_done()
    assert y.tolist() == [1] * 10
    done(current)


def test_notify_waits_for_any_time(
    pair: Cluster, current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default limit of wait() is not that of a stream, which would read old tensors then."""
    limits: list[float] = []

    def wait(handler: int, timeout_ms: float = 10_000) -> None:
        limits.append(timeout_ms)
        pair.worker.wait(handler, timeout_ms)

    monkeypatch.setattr(fserver_lib, "wait", wait)
    notify = fserver.SimpleNotify()
    notify.init()
    notify.stream_wait_event(pair.worker.push_pull([torch.ones(1)], [0], [], []))
    [(handler, _, _)] = pair.server.get_batch()
    pair.server.respond([], handler)
    notify.wait_event_done()
    assert limits[0] > 1000 * 86_400 * 365
    done(current)
