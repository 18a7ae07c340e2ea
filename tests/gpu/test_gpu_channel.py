"""Channels of GPU tensors through Worker.channel and Server.channel: a worker in one process, a
server in the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import gpu_channels
import peers
import pytest
from gpu_channels import MODES, node, opened
from pair import Pair, Side, at_once, say
from peers import Child

from fserver.percentiles import percentile


def eager_and_graph(
    side: Side,
    mode: str,
    n: int,
    operators: bool = False,
    path: str | None = None,
    transport: str = "auto",
) -> None:
    """The same channel eager, then in a graph that is replayed, then eager again; twice, since
    closed channels leave nothing behind. Tensors on the CPU have a loop for the graph.

    operators: by torch.ops.fserver. path: as opened has it. transport: of the node.
    """
    import torch

    where, on_gpu = peers.place(side.device), side.device is not None

    def settle() -> None:
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with node(side, transport=transport) as own, stream:
        for turn in range(2):
            with opened(side, own, n, mode, 7, path) as ch:
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
                    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
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
        [link], done = own.links(), own.describe()
        assert transport in ("auto", link.transport.split("/")[0])
        carried = (path or peers.PATHS[mode]) == "host"
        assert done["push_pulls" if side.index == 0 else "responses"] == 2 * 104 * carried
        side.barrier()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [5, 1 << 18])
def test_channel(pair: Pair, mode: str, n: int) -> None:
    pair.run(eager_and_graph, mode=mode, n=n)


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_host(pair: Pair, transport: str) -> None:
    for n in (5, 1 << 18, 1_310_723):
        pair.run(eager_and_graph, 20, mode="host", n=n, transport=transport)


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
    names = ["expandable" if e is EXPANDABLE else "cudaMallocAsync" if e else "native" for e in env]
    assert two.run(peers.allocator) == [names[0], names[-1]]
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
            two.run(eager_and_graph, mode=mode, n=n, path="host")


@pytest.mark.parametrize("mode", MODES)
def test_one_process(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """Both nodes in one, on two GPUs."""
    if gpus < 2:
        pytest.skip("needs two GPUs, this machine has 1")
    assert child(gpu_channels.channel_in_one, (0, 1), mode, 1 << 18, 50).get() == []


@pytest.mark.parametrize("mode", MODES)
def test_dropped(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """Without close()."""
    assert child(gpu_channels.channel_dropped, (0, gpus - 1), mode).get() == []


@pytest.mark.killed_at_work
@pytest.mark.parametrize("mode", MODES)
def test_started_again(child: Callable[..., Child], gpus: int, mode: str) -> None:
    """A server and the successors of its worker, each with a channel of its own; the memory of
    the dead is back when the channel is closed."""
    peers.Process.ready(2, **peers.FRESH)
    peers.Process.ready(3)
    watch = child(peers.free_memory, 0)
    s = child(gpu_channels.channel_server, gpus - 1, mode, 3)
    scheduler, free = s.get(), []
    for life in range(3):
        env = peers.FRESH if life < 2 else {}
        w = child(gpu_channels.channel_worker, scheduler, 0, mode, life, 1 << 22, **env)
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
    assert free[0] - free[1] < 16 << 20, free


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


def tuned(side: Side, n: int, rounds: int) -> tuple[Any, float, float]:
    """The table, and us of an exchange with it and without: the medians of rounds of 20."""
    import torch
    from bench_channel import _round_trips

    from fserver.channel.plan import TABLE

    found = []
    with node(side) as own:
        before = time.perf_counter()
        for tune in (True, False):
            with opened(side, own, n, "kernel", 11, tune=tune) as ch:
                if tune:
                    table, opening = ch.table, time.perf_counter() - before
                else:
                    assert ch.table == TABLE
                ch.outgoing[0].copy_(torch.arange(n) + side.index)
                torch.cuda.synchronize()
                by_cpu, _ = _round_trips(side, ch, True, rounds)
                found.append(percentile(sorted(by_cpu), 50))
                assert ch.incoming[0].tolist() == [i + 1 - side.index for i in range(n)]
                ch.check()
                side.barrier()
    say(side.index, f"{n} floats: {table}, {opening:.2f} s to open, us {found}")
    assert opening < 10
    return table, found[0], found[1]


@pytest.mark.parametrize("n", [1 << 10, 1 << 14, 7 << 15])
def test_tune(pair: Pair, n: int) -> None:
    rounds = 20 if at_once(pair.devices) else 3
    pair.run(tuned, 20, n=n, rounds=rounds)


def misuse(side: Side, mode: str) -> None:
    """Turns, and two streams at once; afterwards the channel works, and on another stream."""
    import torch

    import fserver

    with node(side) as own, opened(side, own, 64, mode, 5) as ch:
        first, other = torch.cuda.Stream(), torch.cuda.Stream()

        def refused(call: Callable[[], None], why: str) -> None:
            with pytest.raises(fserver.ConfigError, match=why):
                call()

        def on_another(call: Callable[[], None]) -> None:
            with torch.cuda.stream(other):
                refused(call, f"{call.__name__}: .* in use on another stream")

        peers.warm(ch.outgoing[0])
        ch.outgoing[0].fill_(side.index + 1)
        ch.incoming[0].fill_(peers.POISON)
        torch.cuda.synchronize()
        side.barrier()
        with torch.cuda.stream(first):
            if side.index == 0:
                refused(ch.recv, r"(turn of|call) send\(\)")
                side.barrier()
                ch.send()
                ch.recv()  # waits: the server answers behind the barrier
                on_another(ch.send)
                side.barrier()
            else:
                refused(ch.send, r"(turn of|call) recv\(\)")
                ch.recv()  # waits: the worker sends behind the barrier
                on_another(ch.send)
                side.barrier()
                side.barrier()
                ch.send()
            first.synchronize()
        ch.check()
        assert ch.incoming[0].tolist() == [2 - side.index] * 64
        side.barrier()
        with torch.cuda.stream(other):
            for i in range(3, 6):
                if side.index == 0:
                    ch.outgoing[0].fill_(i)
                    ch.send()
                ch.recv()
                other.synchronize()
                assert ch.incoming[0].tolist() == [i * (2 - side.index)] * 64
                if side.index == 1:  # the worker writes to it again afterwards
                    torch.mul(ch.incoming[0], 2, out=ch.outgoing[0])
                    ch.send()
                    other.synchronize()
        ch.check()
        side.barrier()
        # Shapes that differ between the sides.
        with pytest.raises(fserver.ShapeError):
            opened(side, own, 64 + side.index, mode, 6)
        side.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_misuse(pair: Pair, mode: str) -> None:
    pair.run(misuse, mode=mode)


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


@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_parted(pair: Pair, mode: str) -> None:
    pair.run(parted, mode=mode)


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
