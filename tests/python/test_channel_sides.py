"""Sides of stream channels on GPUs, with stand-ins for the GPU: they end, fail and are captured."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from channels import MS, OfGpu, both
from nodes import LIMIT, Cluster, eventually, in_thread, together

import fserver
from fserver.channel import channel, describe, opener, opening, parting


class FakeSide:
    """In place of GpuSide; made for threads whose `local.gpu` is true."""

    def __init__(self) -> None:
        self._words = (ctypes.c_uint32 * 4096)()
        self.abort_word = ctypes.addressof(self._words)
        self.ended = False
        self.at_close: int | None = None
        self.at_finish: BaseException | None = None

    def describe(self, peer: int) -> dict[str, Any]:
        return {}

    def attach(self, descriptions: Any) -> None:
        pass

    def rows(self) -> list[torch.Tensor]:
        return []

    def send(self, rows: Any = None) -> None:
        pass

    recv = explain = send

    def finish(self) -> None:
        if self.at_finish:
            raise self.at_finish

    def end(self) -> None:
        self.ended = True

    def close(self) -> bool:
        if self.at_close is None:
            self.at_close, self._words[0] = self._words[0], 7
        return True

    @property
    def word(self) -> int:
        """What the engine has set since the side was closed; 7: nothing."""
        return self._words[0]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[FakeSide]]:
    local, made = threading.local(), []
    monkeypatch.setattr(opening, "_direct", lambda mode, device: getattr(local, "gpu", False))
    monkeypatch.setattr(opening, "_gpu", lambda *_: made.append(FakeSide()) or made[-1])
    return local, made


@pytest.mark.parametrize("call", ["stop", "close"])
def test_all_channels_of_a_node_end_at_once(
    pair: Cluster,
    on_gpu: tuple[Any, list[FakeSide]],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Every peer is told before any is waited for, and they are waited for once: one that closes
    its sides when it is told keeps nobody waiting, one that does not costs the time of one."""
    local, _ = on_gpu
    limit, count = 4.0, 4
    monkeypatch.setattr(channel, "PARTING_S", limit)

    def opens(open_: Callable[..., Any], i: int) -> Any:
        local.gpu = True
        return open_(name=f"{i}", timeout_ms=MS)

    x, y = torch.ones(8), [torch.empty(8) for _ in range(count)]
    kept = []
    for i in range(count):
        kept += together(
            [
                partial(opens, partial(pair.worker.channel, [x], [i], [y[i]], [i]), i),
                partial(opens, partial(pair.server.channel, [i], [y[i]], [i]), i),
            ]
        )
    mine, theirs = ([ch._side for ch in side] for side in (kept[::2], kept[1::2]))
    start = time.monotonic()
    ended = in_thread(getattr(pair.worker, call))
    eventually(lambda: all(side.word for side in theirs))
    # A side is ended when its peer has been waited for, here for the whole limit. If the node is
    # closed first, no peer is waited for.
    first = not any(side.ended for side in mine)
    assert first or call == "close", "one was waited for before all were told"
    eventually(lambda: all(side.ended for side in mine))
    assert time.monotonic() - start < 3 * limit  # one after another: count * limit
    for ch in kept[1::2]:
        ch.close()
    if call == "stop":
        together([pair.server.stop, pair.scheduler.stop])
    ended.result(LIMIT)


def test_a_side_that_fails_is_kept_while_a_peer_may_use_it(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has opened its side when the server fails."""
    local, made = on_gpu
    monkeypatch.setattr(opener, "PARTING_S", 0.05)

    def attach(self: FakeSide, _: Any) -> None:
        if local.server:
            raise fserver.ConfigError("no peer access")

    monkeypatch.setattr(FakeSide, "attach", attach)

    def call(server: bool, call: Callable[..., Any], *args: Any) -> Any:
        local.gpu, local.server = True, server
        return call(*args, timeout_ms=MS, name="it")

    x, y = torch.ones(8), torch.empty(8)
    worker = in_thread(call, False, pair.worker.channel, [x], [1], [y], [1])
    with pytest.raises(fserver.ConfigError, match="no peer access"):
        call(True, pair.server.channel, [1], [y], [1])
    w = worker.result(LIMIT)
    (side,) = (side for side in made if side is not w._side)
    assert side.ended and side.at_close is None
    w.close()
    eventually(lambda: parting.sweep() or side.at_close is not None)


def test_the_engine_lets_go_of_a_side_that_is_closed(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, made = on_gpu
    zeros = torch.zeros
    x, y = torch.ones(8), torch.empty(8)

    def call(gpu: bool, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        local.gpu = gpu
        return call(*args, timeout_ms=MS, **options)

    def opened(name: str, *gpu: bool) -> list[Any]:
        ask = ([x], [1], [y], [1])
        answer = ([1], [y], [1])
        return together(
            [
                lambda: call(gpu[0], pair.worker.channel, *ask, name=name),
                lambda: call(gpu[1], pair.server.channel, *answer, name=name),
            ]
        )

    # The other side does not come.
    local.gpu = True
    with pytest.raises(fserver.TimeoutError, match="has not opened"):
        pair.worker.channel([x], [1], [y], [1], name="alone", timeout_ms=50)
    assert [side.at_close for side in made] == [1]
    # It has no GPU.
    for ch in opened("mixed", True, False):
        assert ch.path == "host"
        in_thread(ch.close)
    assert [side.at_close for side in made] == [1, 0]
    # Nobody closes it; then its name and its keys are free.
    for _ in range(2):
        w, s = opened("dropped", True, True)
        assert (w.path, s.path) == ("kernel", "kernel")
        del w, s
        gc.collect()
    # Somebody does.
    w, s = opened("closed", True, True)
    together([w.close, s.close])
    assert [side.at_close for side in made[2:]] == [1] * 6
    # Ctrl-C while it waits for what is enqueued.
    w, s = opened("interrupted", True, True)
    made[-1].at_finish = made[-2].at_finish = KeyboardInterrupt()
    for ch in (w, s):
        with pytest.raises(KeyboardInterrupt):
            ch.close()
    # No memory for the last that is needed.
    with monkeypatch.context() as patch:

        def none_left(*args: Any, **options: Any) -> torch.Tensor:
            if "device" in options:
                raise torch.OutOfMemoryError("out of memory")
            return zeros(*args, **options)

        patch.setattr(torch, "zeros", none_left)

        def fails(channel: Callable[..., Any], *args: Any, **options: Any) -> None:
            # The server's own, or what the worker says.
            kinds = (torch.OutOfMemoryError, fserver.Error)
            with pytest.raises(kinds, match="out of memory"):
                call(True, channel, *args, name="token", **options)

        together(
            [
                lambda: fails(pair.worker.channel, [x], [1], [y], [1]),
                lambda: fails(pair.server.channel, [1], [y], [1], push=[torch.empty(8)]),
            ]
        )
    together([ch.close for ch in opened("token", True, True)])
    assert [side.at_close for side in made[8:12]] == [1] * 4
    pair.worker.close()
    pair.server.close()
    assert [side.word for side in made] == [7] * len(made)


def test_nothing_keeps_a_closed_channel(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until the garbage collector runs: it keeps the node."""
    monkeypatch.setattr(opening, "_direct", lambda mode, device: True)
    w, s = both(pair, [torch.ones(8)], [torch.ones(8)])
    together([w.close, s.close])
    for call in (w.send, w.recv, partial(w.send, [1]), partial(w.send, rows=None)):
        with pytest.raises(fserver.ClosedError, match="channel '0' is closed"):
            call()
    del call
    channels = [weakref.ref(w), weakref.ref(s)]
    gc.disable()
    try:
        del w, s
        assert [channel() for channel in channels] == [None, None]
    finally:
        gc.enable()


def test_nothing_to_transfer_between_gpus(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call does nothing, not even when the peer has closed its side."""
    monkeypatch.setattr(opening, "_direct", lambda mode, device: True)
    monkeypatch.setattr(FakeSide, "recv", lambda side: pytest.fail("recv"))
    w, s = both(pair, [torch.ones(8)], [])
    assert w.path == s.path == "kernel"
    w.recv()
    closing = in_thread(w.close)
    eventually(lambda: w._side.at_close is None and s._side.word)
    monkeypatch.setattr(s._side, "send", lambda rows: pytest.fail("send"))
    s.send()
    s.close()
    closing.result(LIMIT)
    for call in (w.recv, s.send):
        with pytest.raises(fserver.ClosedError):
            call()


@pytest.mark.parametrize("how", ["closes", "leaves", "says nothing"])
def test_a_worker_that_does_not_say_which_path(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A server that reaches its GPU waits for that, and no longer than for a side that is not
    opened."""
    monkeypatch.setattr(opening, "_direct", lambda mode, device: True)
    monkeypatch.setattr(opening, "_gpu", lambda *_: FakeSide())
    node, z = pair.worker._node, torch.ones(8)
    limit = 500 if how == "says nothing" else MS
    serving = in_thread(lambda: pair.server.channel([0], [z], [1], name="it", timeout_ms=limit))
    handle = node.channel_open("it")
    tensors = [[key, "float32", [8]] for key in (0, 1)]
    node.channel_tell(handle, 0, describe.text("kernel", "cpu", tensors[:1], tensors[1:]))
    assert '"path": "kernel"' in node.channel_text(handle, 0, MS)
    if how == "closes":
        node.channel_close(handle, 0, "")
    elif how == "leaves":
        pair.worker.close()
    error = serving.exception(LIMIT)
    kinds = {"closes": fserver.ClosedError, "says nothing": fserver.TimeoutError}
    assert isinstance(error, kinds.get(how, fserver.Error)), error


@pytest.mark.parametrize("first", [-5, 2, 1 << 63, 1.5, None, "1", [1]])
def test_keys_that_are_none_of_a_landing(first: Any) -> None:
    text = describe.text("host", "cpu", [], [], lands=first)
    with pytest.raises(fserver.Error, match="peer 3 describes its side in a malformed message"):
        describe.read(3, text)


@pytest.mark.parametrize("kind", [fserver.Error, fserver.ConfigError])
@pytest.mark.parametrize("which", ["worker", "server"])
def test_a_side_that_cannot_be_made_says_so(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, which: str, kind: type[fserver.Error]
) -> None:
    """The other one does not wait for it, and has an error of the same kind. Who has said so is
    told nothing: it may have opened the channel again."""
    local, opened = threading.local(), threading.Event()
    begin, refuse = opener.Opener._begin, opening.Opening.refuse
    told = {}

    def refused(self: Any, error: BaseException) -> None:
        told[local.role] = list(self.waiting)
        refuse(self, error)

    def begun(self: Any, *args: Any) -> Any:
        found = begin(self, *args)
        if local.role == "server":
            opened.set()
        return found

    def made(*_: Any) -> FakeSide:
        assert opened.wait(LIMIT)
        if local.role == which:
            raise kind("no memory for it")
        return FakeSide()

    monkeypatch.setattr(opener.Opener, "_begin", begun)
    monkeypatch.setattr(opening.Opening, "refuse", refused)
    monkeypatch.setattr(opening, "_direct", lambda mode, device: True)
    monkeypatch.setattr(opening, "_gpu", made)
    x, y = torch.ones(8), torch.empty(8)

    def call(role: str) -> str:
        local.role = role
        node = getattr(pair, role)
        args = ([x], [1], [y], [1]) if role == "worker" else ([1], [y], [1])
        with pytest.raises(kind) as caught:
            node.channel(*args, timeout_ms=MS, name="none")
        assert type(caught.value) is kind
        return str(caught.value)

    worker, server = together([lambda: call("worker"), lambda: call("server")])
    reason = "no memory for it"
    refusal = f"channel: {which} 0 refuses: {reason}"
    assert (worker, server) == ((reason, refusal) if which == "worker" else (refusal, reason))
    assert told == {which: [0], ({"worker", "server"} - {which}).pop(): []}


def test_capture(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are refused there, and the channel goes on."""
    x, y = torch.ones(8), torch.empty(8)
    w, s = both(pair, [x], [y])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for call, name in ((w.send, "send"), (s.recv, "recv")):
            with pytest.raises(
                fserver.ConfigError, match=f"^{name}: .*captured.*: call it outside"
            ):
                call()
    w.send()
    s.recv()
    s.outgoing[0].copy_(s.tensors[0][0] * 2)
    s.send()
    w.recv()
    assert y.tolist() == [2] * 8


def test_opening_in_a_capture(
    pair: Cluster, on_gpu: tuple[Any, list[FakeSide]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is made, or told to a peer."""
    _, made = on_gpu
    x, y, z = torch.ones(8), torch.empty(8), torch.ones(8)
    w, s = (
        lambda **more: pair.worker.channel([x], [0], [y], [100], timeout_ms=MS, **more),
        lambda **more: pair.server.channel([0], [z], [100], timeout_ms=MS, **more),
    )
    text = "^channel: the current stream is being captured .*: open the channel before the capture"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(opening, "_direct", lambda mode, device: True)
        patch.setattr(opener, "_like", lambda tensors: pytest.fail("it has allocated"))
        patch.setattr(opener.Opener, "_begin", lambda *_: pytest.fail("it has begun"))
        for call in (w, s):
            for more in ({}, {"mode": "copy"}, {"mode": "host"}, {"tune": True}):
                with pytest.raises(fserver.ConfigError, match=text):
                    call(**more)
    assert made == []
    together([w, s])  # its number and its keys are free


def test_opening_in_a_capture_on_another_gpu(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tensors' device captures counts too, and it is the current one as before."""
    current = [0]

    @contextlib.contextmanager
    def on(device: Any) -> Iterator[None]:
        before, current[0] = current[0], torch.device(device).index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == captured)
    monkeypatch.setattr(torch.cuda, "device", on)
    begun = fserver.Error("it has begun")

    def begin(*_: Any) -> Any:
        raise begun

    monkeypatch.setattr(opener.Opener, "_begin", begin)
    x = torch.ones(8).as_subclass(OfGpu)
    for captured in range(3):
        for call in (
            lambda: pair.worker.channel([x], [0], [], []),
            lambda: pair.worker.channel([], [], [x], [0]),
            lambda: pair.server.channel([], [x], [0]),
            lambda: pair.server.channel([0], [], [], push=[x]),
            lambda: pair.server.channel([0], [], [], device="cuda:1"),
        ):
            with pytest.raises(fserver.Error) as caught:
                call()
            if captured < 2:
                assert "open the channel before the capture" in str(caught.value)
            else:
                assert caught.value is begun
            assert current == [0]
