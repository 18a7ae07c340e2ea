"""Channels of GPU tensors, for tests: of two sides of a pair, and of processes of their own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import peers
from pair import Side

MODES = ["kernel", "copy", "host"]
OPTIONS: dict[str, Any] = {"backend": "CPU", "settings": {"FSERVER_LOG": "error"}}


@contextlib.contextmanager
def node(side: Side, **options: Any) -> Iterator[Any]:
    """This side's node: side 0 is the worker."""
    import fserver

    options = {"connect": False, "init_timeout": 8, **OPTIONS, **options}
    if side.index == 1:
        own = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, **options)
        side.exchange(own.scheduler)
    else:
        own = fserver.Worker(scheduler=side.exchange(None), **options)
    try:
        own.connect()
        yield own
    finally:
        own.close()


def opened(
    side: Side, own: Any, n: int, mode: str, key: int, path: str | None = None, **options: Any
) -> Any:
    """A channel of n floats there and n back; on the server, tensors[0][0] and outgoing[0].

    path: what the channel has, if that is not the mode's.
    """
    import torch

    device = peers.place(side.device)
    t = torch.zeros(n, device=device)
    options = {"mode": mode, "timeout_ms": 4000, "name": str(key), **options}
    if side.index == 0:
        ch = own.channel([t], [key], [torch.zeros(n, device=device)], [key], **options)
    else:
        ch = own.channel([key], [t], [key], **options)
    assert ch.path == (path or peers.PATHS[mode])
    return ch


def _channel(own: Any, x: Any, mode: str, name: str) -> Any:
    """One whose tensors are like x, there and back."""
    import torch

    options = {"mode": mode, "name": name, "timeout_ms": 15000.0}
    if hasattr(own, "push_pull"):
        ch = own.channel([x], [1], [torch.zeros_like(x)], [1], **options)
    else:
        ch = own.channel([1], [x], [1], push=[torch.zeros_like(x)], **options)
    if ch.path != peers.PATHS[mode]:
        raise RuntimeError(f"mode {mode}, and the channel goes by {ch.path}")
    return ch


def _ask(ch: Any, i: int) -> int:
    """Words of an answer that are wrong."""
    import torch

    ch.outgoing[0].fill_(i)
    ch.send()
    ch.recv()
    torch.cuda.current_stream(ch.outgoing[0].device).synchronize()
    return int((ch.incoming[0] != 2 * i).sum())


def _answer(ch: Any) -> None:
    import torch

    ch.recv()
    torch.mul(ch.incoming[0], 2, out=ch.outgoing[0])
    ch.send()
    torch.cuda.current_stream(ch.outgoing[0].device).synchronize()


def channel_in_one(
    pipe: Connection, devices: tuple[int, int], mode: str, n: int, rounds: int
) -> list[str]:
    """A channel between two nodes of this process."""
    import torch

    asking, answering = (torch.zeros(n, device=peers.place(d)) for d in devices)
    peers.warm(asking)
    peers.warm(answering)
    server = peers.server(devices[1])

    def answers() -> None:
        server.connect()
        with torch.cuda.device(devices[1]), torch.cuda.stream(torch.cuda.Stream()):
            with _channel(server, answering, mode, "one") as ch:
                for _ in range(rounds):
                    _answer(ch)
        server.stop()

    bad = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(answers)
        with peers.worker(server.scheduler, devices[0], "auto") as w, torch.cuda.device(devices[0]):
            with _channel(w, asking, mode, "one") as ch, torch.cuda.stream(torch.cuda.Stream()):
                for i in range(rounds):
                    if wrong := _ask(ch, i + 1):
                        bad.append(f"round {i}: {wrong} words are wrong")
        other.result(peers.LIMIT)
    return bad


def channel_dropped(pipe: Connection, devices: tuple[int, int], mode: str) -> list[str]:
    """Sides that nobody closes, or whose other side never comes, and then nodes that end: the
    engine writes to no memory that has been given back."""
    import torch

    import fserver

    bad = []
    tensors = [torch.zeros(1 << 18, device=peers.place(d)) for d in devices]
    server = peers.server(devices[1])
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(server.connect)
        w = peers.worker(server.scheduler, devices[0], "auto")
        connected.result(peers.LIMIT)
        try:
            x = tensors[0]
            w.channel([x], [1], [], [], mode=mode, name="alone", timeout_ms=50)
        except fserver.TimeoutError:
            pass
        else:
            bad.append("a channel without another side")
        for _ in range(3):  # its name and its keys are free each time
            other = pool.submit(_channel, server, tensors[1], mode, "dropped")
            ch = _channel(w, tensors[0], mode, "dropped")
            other.result(peers.LIMIT)
            del ch, other
        w.close()
    server.close()
    return bad


def channel_server(pipe: Connection, device: int, mode: str, lives: int) -> list[str]:
    """Answers through a channel until the worker is lost, and then its successors, through others.
    The last one leaves."""
    import torch

    import fserver

    bad = []
    torch.cuda.set_device(device)
    server = peers.server(device)
    pipe.send(server.scheduler)
    server.connect()
    # One for all: the test watches free memory.
    x = torch.zeros(1 << 22, device=peers.place(device))
    for life in range(lives):
        ch = None
        while ch is None:
            try:
                ch = _channel(server, x, mode, f"life {life}")
            except fserver.PeerLostError:  # it is not there again
                time.sleep(0.01)
        ended: Exception | None = None
        while not ended:
            try:
                _answer(ch)
                ch.check()
            except fserver.Error as error:
                ended = error
        try:
            while True:  # the engine may learn of it later than the stream
                ch.check()
                time.sleep(0.01)
        except fserver.PeerLostError:
            found = "lost"
        except fserver.ClosedError:
            found = "left"
        ch.close()
        if found != ("left" if life == lives - 1 else "lost"):
            bad.append(f"life {life}: {found}: {ended}")
        if life < lives - 1:
            pipe.send(found)
            pipe.recv()
    server.stop()
    return bad


def channel_worker(
    pipe: Connection, scheduler: str, device: int, mode: str, life: int, n: int
) -> list[str]:
    """Asks through a channel until it is told to stop, or killed."""
    import torch

    bad = []
    torch.cuda.set_device(device)
    with peers.worker(scheduler, device, "auto") as w:
        with _channel(w, torch.zeros(n, device=peers.place(device)), mode, f"life {life}") as ch:
            for i in range(20):
                if wrong := _ask(ch, i + 1):
                    bad.append(f"round {i}: {wrong} words are wrong")
            pipe.send("running")
            while not pipe.poll(0):
                _ask(ch, 1)
            pipe.recv()
    return bad
