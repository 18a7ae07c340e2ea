"""What a stream that waits for a flag keeps from going on: nobody but itself. Each function runs in
a process of its own, which is ended when it says nothing within the time."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import peers
import pytest
from pair import Pair, Side
from peers import Child

Make = Callable[..., Child]

HELD_S = 3.0  # what is not over by then has not been let go on


def alone(child: Make, function: Callable[..., list[str]], *args: Any) -> list[str]:
    """What a function gives, in a process whose GPU may stay held: within 20 s from its start."""
    one = child(function, *args, WAITS="1")
    assert one.get() == "ready"
    return one.get()


def _word(device: int, value: int = 0) -> tuple[Any, Any]:
    """Pinned memory, and as the GPU sees it."""
    import torch

    import fserver

    host = torch.full((1,), value, dtype=torch.int64).pin_memory()
    return host, fserver.map_pinned_tensor(host, device)


def _one(device: int) -> Any:
    import torch

    return torch.ones(1, dtype=torch.int64, device=peers.place(device))


@contextmanager
def _nodes(device: int) -> Iterator[tuple[Any, Any]]:
    """A worker and a server in this process."""
    import fserver

    options = {**peers.options(device, "auto"), "connect": False}
    with ExitStack() as end:
        server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, **options)
        end.callback(server.close)
        worker = fserver.Worker(scheduler=server.scheduler, **options)
        end.callback(worker.close)
        thread = threading.Thread(target=server.connect)
        thread.start()
        worker.connect()
        thread.join()
        yield worker, server


def _fill(stream: Any, x: Any) -> threading.Thread:
    """Has a thread enqueue on a stream that waits until the driver takes no more."""
    import torch

    count = [0]

    def run() -> None:
        with torch.cuda.stream(stream):
            for _ in range(20000):
                x.add_(1)
                count[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    seen, since = 0, time.monotonic()
    while thread.is_alive() and time.monotonic() - since < 0.5:
        time.sleep(0.01)
        if count[0] != seen:
            seen, since = count[0], time.monotonic()
    assert thread.is_alive(), "the stream has taken all"
    return thread


def behind_a_full_stream(pipe: Connection, device: int, call: str) -> list[str]:
    """One thread fills the stream, the main one makes a call with an event on it, and a third
    sets the flag for which the stream waits."""
    import torch

    import fserver

    torch.cuda.set_device(device)
    pipe.send("ready")
    stream = torch.cuda.Stream()
    host, flag = _word(device)
    seq = _one(device)
    with _nodes(device) as (worker, server), torch.cuda.stream(stream):
        x, y, z = (torch.full((1000,), 3.0, device=peers.place(device)) for _ in range(3))

        def answer(handler: int, back: Any) -> None:
            if call == "respond_vec":
                server.respond_vec(back, [[back]], [handler])
            else:
                server.respond([back], handler, need_event=True)

        def ask() -> int:
            return worker.push_pull([x], [1], [y], [2], need_event=call == "push_pull")

        for _ in range(2):  # all that is made or loaded once
            z.add_(1)
            fserver.seq_add_one(_one(device))
            h = ask()
            [(handler, _, _)] = server.get_batch(5000)
            answer(handler, z)
            worker.wait(h, 5000)
        stream.synchronize()
        h, handler = -1, -1
        if call != "push_pull":
            h = ask()
            [(handler, _, _)] = server.get_batch(5000)
        fserver.wait_flag(flag, seq)
        thread = _fill(stream, z)
        threading.Timer(1.0, lambda: host.fill_(1)).start()
        if call == "push_pull":
            h = ask()
        elif call == "write_flag":
            fserver.write_flag(flag, seq)
        elif call == "wait_value":
            from fserver import _loader

            _loader.load().wait_value(flag, 1)
        if call == "push_pull":
            [(handler, _, _)] = server.get_batch(20000)
        answer(handler, z)
        worker.wait(h, 20000)
        thread.join()
        stream.synchronize()
    return []


@pytest.mark.parametrize(
    "call", ["push_pull", "respond", "respond_vec", "write_flag", "wait_value"]
)
def test_behind_a_full_stream(child: Make, gpus: int, call: str) -> None:
    assert alone(child, behind_a_full_stream, gpus - 1, call) == []


def freed(pipe: Connection, device: int, how: str) -> list[str]:
    """The flag's memory is dropped while a stream waits for it, and is not another's."""
    import torch

    import fserver

    torch.cuda.set_device(device)
    pipe.send("ready")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        host, flag = _word(device)
        at = ctypes.c_int64.from_address(host.data_ptr())
        seq, pinned = _one(device), _one(device)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        if how == "graph":
            with torch.cuda.graph(graph, stream=stream):
                fserver.wait_flag(flag, seq)
            graph.replay()
        elif how == "unmapped":
            fserver.wait_flag(host, seq)
        else:
            fserver.wait_flag(flag, seq)
        del host, flag, seq, pinned
        gc.collect()
        others = [torch.full((1,), 1, dtype=torch.int64).pin_memory() for _ in range(100)]
        more = [torch.full((1,), -5, dtype=torch.int64, device="cuda") for _ in range(100)]
        time.sleep(0.3)
        assert not stream.query(), "the flag's memory has been used again"
        assert all(int(t) == 1 for t in others)
        del more
        at.value = 1
        stream.synchronize()
        if how == "graph":
            at.value = 0
            graph.replay()
            time.sleep(0.1)
            assert not stream.query()
            at.value = 1
            stream.synchronize()
            del graph
    return []


@pytest.mark.parametrize("how", ["mapped", "unmapped", "graph"])
def test_freed_flags(child: Make, gpus: int, how: str) -> None:
    assert alone(child, freed, gpus - 1, how) == []


def ends(pipe: Connection, device: int) -> list[str]:
    """By its time, and with the last node; those of a graph too."""
    import torch

    import fserver

    torch.cuda.set_device(device)
    pipe.send("ready")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        host, flag = _word(device)
        seq = _one(device)
        start = time.monotonic()
        fserver.wait_flag(flag, seq, timeout_ms=300)
        stream.synchronize()
        assert 0.25 < time.monotonic() - start < HELD_S
        with pytest.raises(fserver.TimeoutError, match="an earlier wait_flag lasted longer"):
            fserver.wait_flag(flag, seq)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            fserver.wait_flag(flag, seq)
            fserver.wait_flag(flag, seq)
        for enqueue in (lambda: fserver.wait_flag(flag, seq), graph.replay):
            with _nodes(device):
                enqueue()
                enqueue()
                time.sleep(0.2)
                assert not stream.query()
            start = time.monotonic()
            stream.synchronize()
            assert time.monotonic() - start < HELD_S
        fserver.wait_flag(flag, seq)  # waits again
        time.sleep(0.2)
        assert not stream.query()
        host.fill_(1)
        stream.synchronize()
    return []


def test_waits_end(child: Make, gpus: int) -> None:
    assert alone(child, ends, gpus - 1) == []


EXIT = """
import torch, fserver
host = torch.zeros(1, dtype=torch.int64).pin_memory()
flag = fserver.map_pinned_tensor(host, 0)
fserver.wait_flag(flag, torch.ones(1, dtype=torch.int64, device="cuda:0"))
print("waits", flush=True)
"""


def test_exit_while_a_stream_waits(gpus: int) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"waits\n"), done.stderr


def beside_a_capture(pipe: Connection, device: int) -> list[str]:
    """In torch's default mode, in another thread."""
    import torch

    import fserver
    from fserver import _loader

    torch.cuda.set_device(device)
    pipe.send("ready")
    extension = _loader.load()
    count = torch.zeros(1, device=peers.place(device))
    count.add_(1)
    host, flag = _word(device)  # torch cannot pin memory while another thread captures
    seq = torch.ones(1, dtype=torch.int64, device=peers.place(device))
    torch.cuda.synchronize()
    inside, over, bad = threading.Event(), threading.Event(), []
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        torch.cuda.set_device(device)
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                count.add_(1)
                inside.set()
                over.wait(10)
                count.add_(1)
        except Exception as error:
            bad.append(repr(error))

    thread = threading.Thread(target=capture)
    thread.start()
    inside.wait(10)
    waits = threading.Thread(target=extension.settle, args=(device,))
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            fserver.write_flag(flag, seq)
            fserver.wait_flag(flag, seq)
            fserver.seq_add_one(seq)
            extension.wait_value(flag, 1)
            mark = extension.Mark(device)
            how = extension.HostCall(mark, device, "send").run(None)
            assert how == 0  # this stream is not captured
            while not mark.passed():
                time.sleep(0.001)
            del flag
            assert int(host) == 1
        waits.start()
        time.sleep(0.2)
    finally:
        over.set()
        thread.join()
    waits.join(10)
    assert not waits.is_alive()
    if not bad:
        graph.replay()
        assert count.item() == 3
    return bad


def test_beside_a_capture(child: Make, gpus: int) -> None:
    assert alone(child, beside_a_capture, gpus - 1) == []


POOL = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")


def receives_leave_room(side: Side, n: int) -> None:
    """So many receives of memory that cannot be shared wait, and a kernel that wants all SMs is
    through meanwhile. Alone and in a graph."""
    import torch

    place = f"cuda:{side.device}"
    out = [torch.full((4 << 20,), 1.0, device=place) for _ in range(n)]
    into = [torch.zeros(4 << 20, device=place) for _ in range(n)]
    channels = [side.open([a], [b], "kernel", 9000) for a, b in zip(out, into, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(n)]
    a = torch.ones(4096, 4096, device=place)
    c = a @ a
    torch.mm(a, a, out=c)
    torch.cuda.synchronize()
    side.barrier()
    for turn in range(2):
        calls = []
        for channel, stream in zip(channels, streams, strict=True):
            if side.index == 1:  # nothing comes back until both are told
                break
            if turn == 0:
                calls.append((stream, [channel.send, channel.recv]))
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):  # waits for the GPU when it begins
                channel.send()
                channel.recv()
            calls.append((stream, [graph.replay]))
        for stream, todo in calls:
            with torch.cuda.stream(stream):
                for call in todo:
                    call()
        if side.index == 0:
            time.sleep(0.2)
            assert not any(stream.query() for stream in streams)
            start = time.monotonic()
            done = torch.cuda.Event()
            for _ in range(10):
                torch.mm(a, a, out=c)
            done.record()
            while not done.query():
                assert time.monotonic() - start < 2, "the SMs are taken"
        side.barrier()
        for channel, stream in zip(channels, streams, strict=True):
            with torch.cuda.stream(stream):
                if side.index == 1:
                    channel.recv()
                    channel.send()
        torch.cuda.synchronize()
        for channel, b in zip(channels, into, strict=True):
            assert channel.status() == (0, 0)
            assert bool((b == 1).all())
        side.barrier()


def test_receives_leave_room(made: Callable[..., Pair], gpus: int) -> None:
    if gpus < 2:
        pytest.skip(f"needs two GPUs, this machine has {gpus}")
    made((0, 1), POOL).run(receives_leave_room, 20, n=6)
