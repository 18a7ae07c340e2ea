"""Channels of GPU tensors through Worker.channel and Server.channel: a worker in one process, a
server in the other."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import peers
import pytest
from pair import Pair, Side, say
from peers import Child

MODES = ["sm", "ce", "proxy"]
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


def opened(side: Side, own: Any, n: int, mode: str, key: int, **options: Any) -> Any:
    """A channel of n floats there and n back; on the server, tensors[0][0] and outgoing[0]."""
    import torch

    device = peers.place(side.device)
    t = torch.zeros(n, device=device)
    options = {"mode": mode, "timeout_ms": 4000, "name": str(key), **options}
    if side.index == 0:
        return own.channel([t], [key], [torch.zeros(n, device=device)], [key], **options)
    return own.channel([key], [t], [key], **options)


def eager_and_graph(
    side: Side, mode: str, n: int, operators: bool = False, path: str | None = None
) -> None:
    """The same channel eager, then in a graph that is replayed, then eager again; twice, since
    closed channels leave nothing behind. Tensors on the CPU have a loop for the graph.

    operators: by torch.ops.fserver. path: what the channel has, if that is not the mode's.
    """
    import torch

    where, on_gpu = peers.place(side.device), side.device is not None

    def settle() -> None:
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with node(side) as own, stream:
        for turn in range(2):
            with opened(side, own, n, mode, 7) as ch:
                assert ch.path == (path or ("cpu" if mode == "proxy" else mode))
                expected = torch.zeros((), device=where)
                wrong = torch.zeros((), dtype=torch.int64, device=where)

                def send(ch: Any = ch) -> None:
                    if operators:
                        torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
                    else:
                        ch.send()

                def recv(ch: Any = ch) -> None:
                    if operators:
                        torch.ops.fserver.recv(ch.number, ch.incoming, ch.token)
                    else:
                        ch.recv()

                def step(
                    ch: Any = ch,
                    expected: Any = expected,
                    wrong: Any = wrong,
                    send: Any = send,
                    recv: Any = recv,
                ) -> None:
                    expected.add_(1)
                    if side.index == 0:
                        ch.outgoing[0].copy_(expected.expand(n))
                        send()
                        recv()
                        wrong.add_((ch.incoming[0] != expected * 2).sum())
                    else:
                        recv()
                        wrong.add_((ch.tensors[0][0] != expected).sum())
                        torch.mul(ch.tensors[0][0], 2, out=ch.outgoing[0])
                        send()

                def steps(step: Any = step) -> None:
                    for _ in range(5):
                        step()

                for _ in range(3):
                    step()
                settle()
                replay: Callable[[], None] = steps
                if on_gpu:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(
                        graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
                    ):
                        steps()
                    replay = graph.replay
                for _ in range(20):
                    replay()
                step()
                settle()
                ch.check()
                assert expected.item() == 104
                assert wrong.item() == 0, f"{wrong.item()} wrong of {n} floats, opened {turn}"
                assert ch.rows[0].tolist() == [n]
                side.barrier()
                if on_gpu:
                    del graph, replay


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [5, 1 << 18])
def test_channel(pair: Pair, mode: str, n: int) -> None:
    pair.run(eager_and_graph, mode=mode, n=n)


EXPANDABLE = dict.fromkeys(
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"
)
POOL = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


@pytest.mark.parametrize(
    "env", [(EXPANDABLE,), (POOL,), (EXPANDABLE, {}), ({}, POOL)], ids=lambda env: repr(env)[:60]
)
def test_allocators(made: Callable[..., Pair], gpus: int, env: tuple[dict[str, str], ...]) -> None:
    """Memory of torch's that no IPC handle names, on both sides or on one."""
    two = made((0, gpus - 1), *env)
    for mode in MODES:
        for n in (5, 1 << 18):
            two.run(eager_and_graph, mode=mode, n=n)


def test_visible_devices(made: Callable[..., Pair], gpus: int) -> None:
    """Each side sees one GPU alone, and calls it 0."""
    last = {"CUDA_VISIBLE_DEVICES": str(gpus - 1)}
    two = made((0, 0), {"CUDA_VISIBLE_DEVICES": "0"}, last)
    for mode in MODES:
        two.run(eager_and_graph, mode=mode, n=1 << 18)


@pytest.mark.parametrize("devices", [(0, None), (None, 0)])
def test_cpu_at_one_end(made: Callable[..., Pair], devices: tuple[int | None, int | None]) -> None:
    """The engine carries it; the end on the GPU is in a graph nevertheless."""
    two = made(devices)
    for mode in MODES:
        for n in (5, 1 << 18):
            two.run(eager_and_graph, mode=mode, n=n, path="cpu")


@pytest.mark.parametrize("mode", MODES)
def test_one_process(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """Both nodes in one, on two GPUs."""
    if gpus < 2:
        pytest.skip("needs two GPUs, this machine has 1")
    assert child(peers.channel_in_one, (0, 1), mode, 1 << 18, 50).get() == []


@pytest.mark.parametrize("mode", MODES)
def test_dropped(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """Without close()."""
    assert child(peers.channel_dropped, (0, gpus - 1), mode).get() == []


@pytest.mark.parametrize("mode", MODES)
def test_started_again(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """A server and the successors of its worker, each with a channel of its own; the memory of
    the dead is back when the channel is closed."""
    peers.Process.ready(3)
    watch = child(peers.free_memory, 0)
    s = child(peers.channel_server, gpus - 1, mode, 3)
    scheduler, free = s.get(), []
    for life in range(3):
        w = child(peers.channel_worker, scheduler, 0, mode, life, 1 << 22)
        assert w.get() == "running"
        if life < 2:
            w.kill()
            assert s.get() == "lost"
            watch.put(True)
            free.append(watch.get())
            s.put(None)
    w.put(None)
    assert (w.get(), s.get()) == ([], [])
    watch.put(False)
    assert free[0] - free[1] < 16 << 20


@pytest.mark.parametrize("mode", MODES)
def test_operators(pair: Pair, mode: str) -> None:
    pair.run(eager_and_graph, mode=mode, n=1 << 12, operators=True)


def checked(side: Side) -> None:
    """What torch finds out about the operators by calling them: the worker asks it, and has the
    server do the other half of each call."""
    import torch

    t = torch.arange(64.0, device=f"cuda:{side.device}")
    with node(side) as own, torch.cuda.stream(torch.cuda.Stream()):
        for key, name in enumerate(("send", "recv")):
            out, back = ([t], []) if name == "send" else ([], [t])
            keys = ([key], []) if name == "send" else ([], [key])
            options: dict[str, Any] = {"timeout_ms": 4000, "name": name}
            if side.index == 0:
                into = [torch.zeros_like(x) for x in back]
                ch = own.channel(out, keys[0], into, keys[1], **options)
            else:
                ch = own.channel(keys[0], back, keys[1], **options)
            with ch:
                if side.index == 0:
                    enqueue = getattr(ch, name)

                    def told(enqueue: Any = enqueue) -> None:
                        side.link.send(True)
                        enqueue()

                    setattr(ch, name, told)
                    call = getattr(torch.ops.fserver, name).default
                    tensors = ch.outgoing if name == "send" else ch.incoming
                    torch.library.opcheck(call, (ch.number, tensors, ch.token))
                    side.link.send(False)
                else:
                    while side.link.recv():
                        ch.recv() if name == "send" else ch.send()
                torch.cuda.current_stream().synchronize()
                ch.check()
                assert all(torch.equal(x, t) for x in ch.incoming)
                side.barrier()


def test_operators_are_what_they_say(pair: Pair) -> None:
    pair.run(checked, 25)


def tuned(side: Side, n: int) -> tuple[Any, float, float]:
    """The table, and us of an exchange with it and without."""
    import torch
    from bench_channel import _round_trips

    from fserver.channel.plan import TABLE

    found = []
    with node(side) as own:
        before = time.perf_counter()
        for tune in (True, False):
            with opened(side, own, n, "sm", 11, tune=tune) as ch:
                if tune:
                    table, opening = ch.table, time.perf_counter() - before
                else:
                    assert ch.table == TABLE
                ch.outgoing[0].copy_(torch.arange(n) + side.index)
                torch.cuda.synchronize()
                by_cpu, _ = _round_trips(side, ch, True, 20)
                found.append(sorted(by_cpu)[10])
                assert ch.incoming[0].tolist() == [i + 1 - side.index for i in range(n)]
                ch.check()
                side.barrier()
    say(side.index, f"{n} floats: {table}, {opening:.2f} s to open, us {found}")
    assert opening < 10
    return table, found[0], found[1]


@pytest.mark.parametrize("n", [1 << 10, 1 << 14, 7 << 15])
def test_tune(pair: Pair, n: int) -> None:
    pair.run(tuned, 20, n=n)


def compiled(side: Side, backend: str) -> None:
    """torch.compile takes a whole step."""
    import torch
    import torch._inductor.config

    torch.compiler.reset()
    torch._inductor.config.compile_threads = 1  # in this process
    # The first to have compiled its step waits for the other.
    with node(side) as own, opened(side, own, 4096, "sm", 3, timeout_ms=60000) as ch:

        def worker(x: Any) -> Any:
            ch.outgoing[0].copy_(x * 2)
            torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
            torch.ops.fserver.recv(ch.number, ch.incoming, ch.token)
            return ch.incoming[0] + 1

        def server(x: Any) -> Any:
            torch.ops.fserver.recv(ch.number, ch.incoming, ch.token)
            ch.outgoing[0].copy_(ch.incoming[0] + x)
            torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
            return x

        step = torch.compile(worker if side.index == 0 else server, backend=backend, fullgraph=True)
        several = torch.arange(4096.0, device=f"cuda:{side.device}")
        for i in range(5):
            y = step(several + i if side.index == 0 else torch.full_like(several, 10 * i))
            torch.cuda.synchronize()
            if side.index == 0:
                assert torch.equal(y, 2 * (several + i) + 10 * i + 1)
        ch.check()
        side.barrier()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(pair: Pair, backend: str) -> None:
    if backend == "inductor" and not (
        importlib.util.find_spec("triton") and shutil.which(os.environ.get("CC", "gcc"))
    ):
        pytest.skip("inductor needs triton and a C compiler")
    pair.run(compiled, 25 if backend == "aot_eager" else 90, backend=backend)


def misuse(side: Side) -> None:
    import torch

    import fserver

    with node(side) as own, opened(side, own, 64, "sm", 5) as ch:
        first, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            if side.index == 0:
                with pytest.raises(fserver.ConfigError, match="turn of send"):
                    ch.recv()
                ch.send()
                ch.recv()  # waits: the server is told to answer below
                with torch.cuda.stream(other), pytest.raises(fserver.ConfigError, match="another"):
                    ch.send()
                side.barrier()
            else:
                side.barrier()
                ch.recv()
                ch.send()
        torch.cuda.synchronize()
        ch.check()
        side.barrier()
        # Shapes that differ between the sides.
        with pytest.raises(fserver.ShapeError):
            opened(side, own, 64 + side.index, "sm", 6)
        side.barrier()


def test_misuse(pair: Pair) -> None:
    pair.run(misuse)


def freed(side: Side) -> None:
    """A tensor of a channel gives up its memory."""
    import torch

    import fserver

    with node(side) as own:
        for key, mode in enumerate(MODES):
            with opened(side, own, 5, mode, key) as ch:
                side.barrier()
                ch.outgoing[0].untyped_storage().resize_(0)
                with pytest.raises(fserver.ConfigError, match="lost its memory"):
                    ch.send() if side.index == 0 else ch.recv()
                side.barrier()
        assert float(torch.ones(5, device=f"cuda:{side.device}").sum()) == 5


def test_freed(pair: Pair) -> None:
    pair.run(freed)


def parted(side: Side, mode: str) -> None:
    """The worker closes its side in good order: the server gets what was sent before, and then is
    told."""
    import torch

    import fserver

    with node(side) as own, opened(side, own, 64, mode, 3) as ch:
        if side.index == 0:
            ch.outgoing[0].fill_(1)
            ch.send()
            ch.recv()
            assert ch.incoming[0].tolist() == [2] * 64
            ch.outgoing[0].fill_(3)
            ch.send()
            torch.cuda.synchronize()
            ch.close()
            side.barrier()
            return
        ch.recv()
        torch.mul(ch.incoming[0], 2, out=ch.outgoing[0])
        ch.send()
        torch.cuda.synchronize()
        time.sleep(0.5)  # the worker has closed by then
        ch.recv()
        assert ch.incoming[0].tolist() == [3] * 64
        with pytest.raises(fserver.ClosedError):
            ch.send()
        with pytest.raises(fserver.ClosedError):
            ch.check()
        ch.close()
        side.barrier()
        assert float(torch.ones(5, device=f"cuda:{side.device}").sum()) == 5


@pytest.mark.parametrize("mode", ["sm", "ce"])
def test_parted(pair: Pair, mode: str) -> None:
    pair.run(parted, mode=mode)


def closed_in_a_capture(side: Side, mode: str) -> None:
    """In the mode that is torch's default."""
    import torch

    with node(side) as own:
        count = torch.zeros(1, device=f"cuda:{side.device}")
        ch = opened(side, own, 64, mode, 4)
        calls = (ch.send, ch.recv) if side.index == 0 else (ch.recv, ch.send)
        for call in calls:
            call()
        torch.cuda.synchronize()
        side.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            count.add_(1)
            ch.close()
            count.add_(1)
        for _ in range(3):
            graph.replay()
        assert count.item() == 6
        side.barrier()


@pytest.mark.parametrize("mode", ["sm", "ce"])
def test_closed_in_a_capture(pair: Pair, mode: str) -> None:
    pair.run(closed_in_a_capture, mode=mode)


def cannot_be_captured(side: Side) -> None:
    """A channel of CPU tensors; it and the GPU are of use after the capture."""
    import torch

    import fserver

    with node(side) as own:
        t, back = torch.zeros(64), torch.zeros(64)
        if side.index == 0:
            ch = own.channel([t], [8], [back], [8], timeout_ms=4000, name="8")
        else:
            ch = own.channel([8], [t], [8], timeout_ms=4000, name="8")
        with ch:
            count = torch.zeros(1, device=f"cuda:{side.device}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                count.add_(1)
                with pytest.raises(fserver.ConfigError, match="captured in a graph .* outside"):
                    ch.send() if side.index == 0 else ch.recv()
            if side.index == 0:
                ch.outgoing[0].fill_(3)
                ch.send()
                ch.recv()
                assert back.tolist() == [6] * 64
            else:
                ch.recv()
                torch.mul(ch.tensors[0][0], 2, out=ch.outgoing[0])
                ch.send()
            graph.replay()
            assert count.item() == 1
            ch.check()
            side.barrier()


def test_cannot_be_captured(pair: Pair) -> None:
    pair.run(cannot_be_captured)


def peer_dies(side: Side, mode: str) -> tuple[float, str]:
    """The server is killed while the worker's stream waits for it."""
    import torch

    import fserver

    with node(side) as own:
        ch = opened(side, own, 4096, mode, 9)
        side.exchange(None)
        if side.index == 1:
            time.sleep(0.3)  # the worker's stream waits by then
            os.kill(os.getpid(), 9)
        ch.send()
        ch.recv()
        started = time.perf_counter()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
        say(0, f"{mode}: the stream ended after {took:.3f} s")
        with pytest.raises(fserver.PeerLostError) as caught:
            while True:
                ch.check()
                time.sleep(0.01)
        with pytest.raises(fserver.PeerLostError, match="gone"):
            ch.send()
        ch.close()
        assert torch.ones(1000, device=f"cuda:{side.device}").sum().item() == 1000
        return took, caught.value.role


@pytest.mark.parametrize("mode", MODES)
def test_killed(fresh: Pair, mode: str) -> None:
    for index in (0, 1):
        fresh.start(index, peer_dies, mode=mode)
    took, role = fresh.result(0)
    assert took < 3 and role == "server"
