"""What servers and workers do in the tests of push_pulls. peers.py runs it in children."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import peers


def serve(
    pipe: Connection,
    device: int | None,
    transport: str = "auto",
    sleep: int = 0,
    fixed: int = 0,
    pinned: bool = False,
    again: str = "",
    need_event: bool = True,
) -> dict[str, Any]:
    """Answers each tensor of uint8 with its complement, behind a kernel of so many cycles, until
    the worker leaves. fixed: bytes of a receive buffer of the application's own for key 0.
    pinned: answers are in pinned host memory, by turns as they are and seen by the GPU.
    need_event: of respond; False: the kernels are waited for here."""
    import torch

    import fserver

    where = {"scheduler": again} if again else {"host_scheduler": True, "scheduler": "127.0.0.1:0"}
    server = fserver.Server(**where, connect=False, **peers.options(device, transport))
    own = torch.full((max(fixed, 1),), peers.POISON, dtype=torch.uint8, device=peers.place(device))
    if fixed:
        if own.is_cuda:
            torch.cuda.synchronize()  # peers write beside our streams
        server.register_recv_buffer(own, [0], [0])
    if not again:  # no worker comes before it knows where to
        pipe.send(server.scheduler)
    server.connect()
    seen: dict[str, Any] = {"requests": 0, "devices": set(), "inside": True, "transport": ""}
    kept: list[Any] = []
    while True:
        try:
            for handler, tensors, keys in server.get_batch():
                answers = []
                for key, x in zip(keys, tensors, strict=True):
                    seen["devices"].add(str(x.device))
                    if fixed and key == 0:
                        begin = own.data_ptr()
                        seen["inside"] &= begin <= x.data_ptr() <= begin + fixed - x.numel()
                    if sleep and x.is_cuda:
                        torch.cuda._sleep(sleep)
                    answer = torch.bitwise_not(x)
                    if pinned:
                        answer = answer.cpu().pin_memory()
                        if seen["requests"] % 2:
                            answer = fserver.map_pinned_tensor(answer, device)
                    answers.append(answer)
                if need_event:  # which is the default
                    server.respond(answers, handler)
                else:
                    torch.cuda.synchronize(device)
                    server.respond(answers, handler, need_event=False)
                kept = answers
                seen["requests"] += 1
        except fserver.ClosedError:
            break
        except fserver.PeerLostError:  # also of respond, if the worker has been killed since
            kept.clear()
            time.sleep(0.01)
            continue
        for link in server.links() if seen["requests"] <= 8 else ():
            seen["transport"] = link.transport
    server.stop()
    return seen


def round_trips(
    pipe: Connection,
    scheduler: str,
    device: int | None,
    transport: str,
    sizes: list[int],
    rounds: int,
    need_event: bool = True,
) -> dict[str, Any]:
    """Checked exchanges of each size, with what is pulled poisoned before each. need_event: of
    push_pull; False: the kernels are waited for here."""
    import torch

    where = peers.place(device)
    bad: list[str] = []
    with peers.worker(scheduler, device, transport) as w:
        for key, n in enumerate(sizes):
            y = torch.empty(n, dtype=torch.uint8, device=where)
            for i in range(rounds):
                x = torch.randint(0, 256, (n,), dtype=torch.uint8, device=where)
                y.fill_(peers.POISON)
                if not need_event:
                    torch.cuda.synchronize(device)
                h = w.push_pull([x], [key], [y], [key], need_event=need_event)
                w.wait(h, timeout_ms=15000)
                if not torch.equal(y, torch.bitwise_not(x)):
                    wrong = int((y != torch.bitwise_not(x)).sum())
                    bad.append(f"size {n}, round {i}: {wrong} bytes are wrong")
        how = w.links()[0].transport
    return {"bad": bad, "transport": how}


def many(pipe: Connection, scheduler: str, device: int, transport: str, n: int, rounds: int) -> int:
    """Exchanges of n bytes, each with other values and over poisoned memory; gives the bytes that
    were wrong."""
    import torch

    x = torch.empty(n, dtype=torch.uint8, device=peers.place(device))
    y = torch.empty_like(x)
    wrong = torch.zeros((), dtype=torch.int64, device=peers.place(device))
    with peers.worker(scheduler, device, transport) as w:
        for i in range(rounds):
            x.fill_(i % 251)
            y.fill_(peers.POISON if i % 251 != 255 - peers.POISON else 0)
            w.wait(w.push_pull([x], [0], [y], [0]), timeout_ms=15000)
            wrong += (y != 255 - i % 251).sum()
    return int(wrong)


def interior(pipe: Connection, scheduler: str, device: int | None, transport: str) -> list[str]:
    """Tensors in the middle of larger ones: nothing around them is touched."""
    import torch

    bad = []
    x = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=peers.place(device))
    y = torch.empty(1 << 20, dtype=torch.uint8, device=peers.place(device))
    with peers.worker(scheduler, device, transport) as w:
        for i, (at, n) in enumerate([(0, 1), (1, 4095), (12345, 65537), (500001, 524287)] * 8):
            y.fill_(peers.POISON)
            w.wait(w.push_pull([x[at : at + n]], [i % 4], [y[at : at + n]], [0]), timeout_ms=15000)
            if not torch.equal(y[at : at + n], torch.bitwise_not(x[at : at + n])):
                bad.append(f"{n} bytes at {at} are wrong")
            if not bool((y[:at] == peers.POISON).all() and (y[at + n :] == peers.POISON).all()):
                bad.append(f"memory around {n} bytes at {at} was written to")
    return bad


def pinned(
    pipe: Connection, scheduler: str, device: int, transport: str, sizes: list[int], rounds: int
) -> list[str]:
    """Tensors in pinned host memory, as they are and as tensors of the GPU over the same memory,
    each pushed and pulled with each. Nothing around them is touched."""
    import torch

    import fserver

    bad = []
    with peers.worker(scheduler, device, transport) as w:
        for key, n in enumerate(sizes):
            x, y = (torch.empty(n + 200, dtype=torch.uint8).pin_memory() for _ in range(2))
            views = [fserver.map_pinned_tensor(t, device) for t in (x, y)]
            own = [
                torch.empty(n + 200, dtype=torch.uint8, device=peers.place(device))
                for _ in range(2)
            ]
            for i in range(rounds):
                pushed, pulled = (x, views[0], own[0])[i % 3], (y, views[1], own[1])[i // 3 % 3]
                pushed.random_(256)
                pulled.fill_(peers.POISON)
                torch.cuda.synchronize(device)  # the host is to see what its GPU has written
                inner = slice(100, 100 + n)
                w.wait(
                    w.push_pull([pushed[inner]], [key], [pulled[inner]], [key]), timeout_ms=15000
                )
                want = torch.full((n + 200,), peers.POISON, dtype=torch.uint8)
                want[inner] = torch.bitwise_not(pushed[inner]).cpu()
                if not torch.equal(pulled.cpu(), want):
                    wrong = int((pulled.cpu() != want).sum())
                    bad.append(f"size {n}, round {i}: {wrong} bytes are wrong")
    return bad


def churn(
    pipe: Connection, scheduler: str, device: int | None, transport: str, rounds: int
) -> dict[str, Any]:
    """New tensors for each exchange; now and then all free memory goes back to the driver, and
    other tensors come to lie where earlier ones were."""
    import random

    import torch

    chance = random.Random(7)
    bad = []
    with peers.worker(scheduler, device, transport) as w:
        guards: list[torch.Tensor] = []
        for i in range(rounds):
            n = chance.choice([100, 70000, 1 << 20, 3 << 20, 22 << 20])
            x = torch.randint(0, 256, (n,), dtype=torch.uint8, device=peers.place(device))
            y = torch.full((n,), peers.POISON, dtype=torch.uint8, device=peers.place(device))
            w.wait(w.push_pull([x], [i % 5], [y], [0]), timeout_ms=15000)
            if not torch.equal(y, torch.bitwise_not(x)):
                bad.append(f"round {i}: {n} bytes are wrong")
            del x, y
            if i % 10 == 9:
                bad += [f"round {i}: a freed block was written to"] * any(
                    bool((g != peers.POISON).any()) for g in guards
                )
                torch.cuda.empty_cache()
                guards = [
                    torch.full((k,), peers.POISON, dtype=torch.uint8, device=peers.place(device))
                    for k in (100, 1 << 20, 22 << 20)
                ]
        how = w.links()[0].transport
    return {"bad": bad, "transport": how}


def behind_kernels(pipe: Connection, scheduler: str, device: int, transport: str) -> list[str]:
    """What is pushed is made by a kernel that waits behind a long one; so is what is pulled read
    by one. push_pull returns before they have run."""
    import torch

    bad = []
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=peers.place(device))
    y = torch.empty_like(x)
    streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device)]
    with peers.worker(scheduler, device, transport) as w:
        w.wait(w.push_pull([x], [0], [y], [0]))
        for i in range(40):
            with torch.cuda.stream(streams[i % 2]):
                torch.cuda._sleep(50_000_000)  # some 30 ms
                x.fill_(i + 1)
                start = time.perf_counter()
                h = w.push_pull([x], [0], [y], [0])
                took = time.perf_counter() - start
                if took > 0.02:
                    bad.append(f"round {i}: push_pull waited for the stream, {took * 1e3:.1f} ms")
                w.wait(h, timeout_ms=15000)
                if not bool((y == 255 - (i + 1)).all()):
                    bad.append(f"round {i}: sent before the kernel had run")
            torch.cuda.synchronize(device)
    return bad


def beside_kernels(pipe: Connection, scheduler: str, device: int, transport: str) -> list[str]:
    """With need_event=False, what is there already travels while a long kernel runs."""
    import torch

    bad = []
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=peers.place(device))
    y = torch.empty_like(x)
    with peers.worker(scheduler, device, transport) as w:
        w.wait(w.push_pull([x], [0], [y], [0]))
        for i in range(5):
            x.fill_(i + 1)
            torch.cuda.synchronize(device)
            torch.cuda._sleep(500_000_000)  # some 300 ms
            busy = torch.cuda.Event()
            busy.record(torch.cuda.current_stream(device))
            h = w.push_pull([x], [0], [y], [0], need_event=False)
            w.wait(h, timeout_ms=15000)
            if busy.query():
                bad.append(f"round {i}: the stream was waited for")
            torch.cuda.synchronize(device)
            if not bool((y == 255 - (i + 1)).all()):
                bad.append(f"round {i}: wrong bytes")
    return bad


CAPTURED = "is being captured into a CUDA graph, but this call cannot be captured: make it outside"


def wrong(pipe: Connection, scheduler: str, device: int) -> list[str]:
    """Calls that must be refused, by name; and that the node works after each."""
    import torch

    import fserver
    from fserver.notify import Notify

    bad = []
    there = peers.place(device)
    x = torch.zeros(1000, dtype=torch.uint8, device=there)
    y, z = torch.empty_like(x), torch.empty_like(x)
    count = torch.zeros(1, dtype=torch.int64, device=there)
    others = [torch.zeros(10, device="meta")]
    if torch.cuda.device_count() > 1:
        others.append(torch.zeros(10, device=f"cuda:{1 - device}"))
    with peers.worker(scheduler, device, "auto") as w:

        def refused(
            what: str, text: str, *args: Any, call: Callable[..., Any] | None = None
        ) -> None:
            try:
                (call or w.push_pull)(*args)
            except (fserver.ConfigError, fserver.ShapeError) as error:
                if text not in str(error):
                    bad.append(f"{what}: {error}")
            else:
                bad.append(f"{what}: was taken")

        for other in others:
            refused("push", "push_tensors[0] is on device", [other], [0], [y], [0])
            refused("pull", "pull_tensors[0] is on device", [x], [0], [other], [0])
            if other.is_cuda:
                text = f"push[0] is on {other.device}, but this node's GPU is {there}"
                refused("channel", text, [other], [0], [], [], call=w.channel)
        refused("strides", "not contiguous", [x.view(10, 100).t()], [0], [y], [0])
        refused("overlap", "share memory", [x], [0], [y[:600], y[500:]], [0, 1])
        if w.device != there:
            bad.append(f"the node's device is {w.device}")
        notify = Notify(w.wait, lambda: None)
        notify.init()
        graph = torch.cuda.CUDAGraph()
        h = w.push_pull([x], [0], [y], [0])
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            count.add_(1)
            refused("capture", CAPTURED, [x], [0], [z], [0])  # y may still belong to h
            refused("stream_wait_event", CAPTURED, h, call=notify.stream_wait_event)
            refused("block_now_stream", CAPTURED, call=notify.block_now_stream)
            w.wait(h)  # no stream has part in that
        for _ in range(3):
            graph.replay()
        if int(count) != 3:
            bad.append(f"a graph that was captured around them counts {int(count)} in 3 replays")
        if not bool((y == 255).all()):
            bad.append("a request from before a capture was not answered")
        y.fill_(peers.POISON)
        h = w.push_pull([x], [0], [y], [0])
        notify.stream_wait_event(h)
        if not bool((y == 255).all()):
            bad.append("the node does not work any more")
        notify.wait_event_done()
    return bad


def wrong_server(pipe: Connection, device: int) -> list[str]:
    """As wrong, for two requests that are answered by each of the calls after it was refused."""
    import torch

    import fserver
    from fserver.notify import Notify

    bad = []
    torch.cuda.set_device(device)
    server = peers.server(device)
    pipe.send(server.scheduler)
    server.connect()
    notify = Notify(lambda handler: None, server.get_batch)
    notify.init()
    count = torch.zeros(1, dtype=torch.int64, device=peers.place(device))
    for turn in range(2):
        [(handler, [x], _)] = server.get_batch()
        answer = torch.bitwise_not(x)
        answers: list[tuple[Any, ...]] = [
            (server.respond, [answer], handler, True),
            (server.respond_vec, answer, [[x]], [handler]),
        ]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            count.add_(1)
            for call, *args in [*answers, (notify.block_now_stream_and_get_batch,)]:
                try:
                    call(*args)
                except fserver.ConfigError as error:
                    if CAPTURED not in str(error):
                        bad.append(f"{call.__name__}: {error}")
                else:
                    bad.append(f"{call.__name__}: was taken")
        graph.replay()
        call, *args = answers[turn]
        call(*args)
        if int(count) != turn + 1:
            bad.append(f"a graph that was captured around them counts {int(count)}")
    server.stop()
    return bad


def notified(pipe: Connection, scheduler: str, device: int, transport: str) -> list[str]:
    """A stream that waits for a request reads what it has brought."""
    import torch

    from fserver.notify import Notify

    bad = []
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=peers.place(device))
    y, z = torch.empty_like(x), torch.empty_like(x)
    torch.cuda.set_device(device)
    with peers.worker(scheduler, device, transport) as w:
        notify = Notify(w.wait, lambda: None)
        notify.init()
        for i in range(50):
            x.fill_(i)
            y.fill_(peers.POISON)
            h = w.push_pull([x], [0], [y], [0])
            notify.stream_wait_event(h)
            z.copy_(y)
            notify.wait_event_done()
            torch.cuda.synchronize(device)
            if not bool((z == 255 - i).all()):
                bad.append(f"round {i}: the stream did not wait")
    return bad


@contextlib.contextmanager
def library(role: str, port: int, device: int) -> Iterator[Any]:
    """The functions of fserver_lib between init() and stop(), set up by the environment."""
    import fserver

    settings = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_RANK_OFFSET": str(-device),
        "STEPMESH_GPU": str(device),
        "STEPMESH_BACKEND": "GPU",
        "FSERVER_HOST_SCHEDULER": str(int(role == "server")),
    }
    os.environ.update(settings)
    try:
        fserver.init()
        yield fserver
        fserver.stop()
    finally:
        for name in settings:
            del os.environ[name]


def notified_server(pipe: Connection, device: int, rounds: int) -> list[str]:
    """With SimpleNotify: asks for each batch before it is there, and has the stream make the
    answer of the receive buffer that it comes to."""
    import torch

    bad = []
    torch.cuda.set_device(device)
    own = torch.zeros(1 << 20, dtype=torch.uint8, device=peers.place(device))
    answer = torch.empty_like(own)
    torch.bitwise_not(own, out=answer)  # a stream that waits may not load a kernel
    torch.cuda.synchronize(device)  # peers write beside our streams
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipe.send(port)
    with library("server", port, device) as f:
        f.register_recv_buffer(own, [0], [0])
        f.barrier(True, True)
        notify = f.SimpleNotify()
        notify.init()
        for i in range(rounds + 1):
            notify.block_now_stream_and_get_batch()
            torch.bitwise_not(own, out=answer)
            [(handler, [x], keys)] = notify.get_future_batch_data()
            if (x.data_ptr(), keys) != (own.data_ptr(), [0]):
                bad.append(f"round {i}: keys {keys} at {x.data_ptr() - own.data_ptr()}")
            f.respond([answer], handler, need_event=True)
        notify.block_now_stream_and_get_batch()
        try:
            notify.get_future_batch_data()
        except f.ClosedError:
            torch.cuda.synchronize(device)  # the stream goes on
        else:
            bad.append("a batch came after the last")
    return bad


def notified_worker(pipe: Connection, port: int, device: int, rounds: int) -> list[str]:
    """With SimpleNotify: the stream reads what a request brings, told to wait for it before the
    request is made and after."""
    import torch

    bad = []
    torch.cuda.set_device(device)
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=peers.place(device))
    y, before, after = (torch.empty_like(x) for _ in range(3))
    with library("worker", port, device) as f:
        f.barrier(True, True)
        notify = f.SimpleNotify()
        notify.init()
        f.wait(f.push_pull([x], [0], [y], [0]))
        for i in range(rounds):
            x.fill_(i)
            y.fill_(peers.POISON)
            torch.cuda.synchronize(device)  # the push does not wait for the stream, which waits
            notify.block_now_stream()
            before.copy_(y)
            h = f.push_pull([x], [0], [y], [0], need_event=False)
            notify.stream_wait_event(h)
            after.copy_(y)
            notify.wait_event_done()
            torch.cuda.synchronize(device)
            for call, z in (("block_now_stream", before), ("stream_wait_event", after)):
                if not bool((z == 255 - i).all()):
                    bad.append(f"round {i}: the stream did not wait after {call}")
    return bad


def flags(pipe: Connection, device: int) -> list[str]:
    """write_flag, wait_flag, seq_add_one and map_pinned_tensor, also in a graph."""
    import torch

    import fserver

    bad = []
    torch.cuda.set_device(device)
    seq = torch.zeros(1, dtype=torch.int64, device=peers.place(device))
    flag = torch.zeros(1, dtype=torch.int64, device=peers.place(device))
    host = torch.zeros(1, dtype=torch.int64).pin_memory()
    view = fserver.map_pinned_tensor(host, device)
    if view.device != torch.device(peers.place(device)) or view.dtype != torch.int64:
        bad.append(f"a view on {view.device} of {view.dtype}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fserver.seq_add_one(seq)
        fserver.write_flag(flag, seq)
        fserver.write_flag(host, seq)
        fserver.wait_flag(flag, seq)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    if (int(seq), int(flag), int(host), int(view)) != (100, 100, 100, 100):
        bad.append(f"counted to {int(seq)}, {int(flag)}, {int(host)}, {int(view)}")
    done = torch.cuda.Event()
    fserver.seq_add_one(seq)
    fserver.wait_flag(view, seq)
    done.record()
    time.sleep(0.05)
    if done.query():
        bad.append("wait_flag did not wait")
    host[0] = 101
    done.synchronize()
    for call, args in [
        (fserver.write_flag, (torch.zeros(1, dtype=torch.int64), seq)),
        (fserver.write_flag, (flag.int(), seq)),
        (fserver.seq_add_one, (host,)),
        (fserver.map_pinned_tensor, (torch.zeros(1), device)),
    ]:
        try:
            call(*args)
        except fserver.Error:
            pass
        else:
            bad.append(f"{call.__name__} took what it cannot use")
    return bad


def until_killed(pipe: Connection, scheduler: str, device: int, transport: str) -> None:
    """Exchanges large tensors for ever."""
    import torch

    x = torch.zeros(64 << 20, dtype=torch.uint8, device=peers.place(device))
    y = torch.empty_like(x)
    w = peers.worker(scheduler, device, transport)
    h = w.push_pull([x], [0], [y], [0])
    w.wait(h, timeout_ms=15000)
    pipe.send("running")
    while True:
        w.wait(w.push_pull([x], [0], [y], [0]), timeout_ms=15000)


def survives(
    pipe: Connection, scheduler: str, device: int, transport: str, rounds: int, lives: int
) -> list[str]:
    """Exchanges while its server is killed and started again, so many times."""
    import torch

    import fserver

    x = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device=peers.place(device))
    y = torch.empty_like(x)
    bad = []
    with peers.worker(scheduler, device, transport) as w:

        def exchange() -> bool:
            try:
                y.fill_(peers.POISON)
                w.wait(w.push_pull([x], [0], [y], [0]), timeout_ms=15000)
            except fserver.PeerLostError:
                time.sleep(0.01)
                return False
            bad.extend(["wrong bytes"] * (not torch.equal(y, torch.bitwise_not(x))))
            return True

        for life in range(lives + 1):
            good = 0
            while good < rounds:
                good += exchange()
            pipe.send("running")
            if life < lives:
                while exchange():
                    pass
                pipe.send("lost")
                pipe.recv()
    return bad


def in_one(
    pipe: Connection, devices: tuple[int, int], transport: str, sizes: list[int], rounds: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Worker and server in this process."""
    here, there = multiprocessing.Pipe()
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(serve, there, devices[1], transport)
        scheduler = here.recv()
        result = round_trips(pipe, scheduler, devices[0], transport, sizes, rounds)
        return result, server.result(peers.LIMIT)
