"""Channels of GPU tensors in CUDA graphs, beside captures, and in compiled programs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import peers
import pytest
from gpu_channels import MODES, node, opened
from pair import Pair, Side, at_once


def layered(
    side: Side,
    mode: str,
    layers: int,
    stages: int,
    replays: int,
    apart: bool,
    transport: str = "auto",
) -> None:
    """A model's layers in one graph on each side, each stage on a channel of its own: the worker
    sends x, the server answers 3 x + a number of the layer, and the worker goes on with 5 times
    that. Sums of int32 wrap and are exact, so that one word which is wrong, old or not there is
    wrong in the end; x is another in each replay. The graph itself counts the words that are wrong
    in the last answers. Tensors on the CPU have a loop for the graph.

    apart: what is sent is on a stream of its own. path: what the channels have, if that is not the
    mode's.
    """
    import torch

    rows, width = 8, 1024
    where, on_gpu = peers.place(side.device), side.device is not None
    made = torch.Generator().manual_seed(1)
    first = torch.randint(-(1 << 31), 1 << 31, (stages, rows, width), generator=made)
    first = first.to(torch.int32).to(where)
    turn = torch.zeros((), dtype=torch.int32, device=where)
    wrong = torch.zeros((), dtype=torch.int64, device=where)
    outgoing, incoming = torch.zeros_like(first), torch.zeros_like(first)

    def addend(layer: int, stage: int) -> int:
        return 7 + 64 * layer + stage

    def compute(layer: int, stage: int) -> None:
        if side.index == 1:
            torch.mul(incoming[stage], 3, out=outgoing[stage]).add_(addend(layer, stage))
        elif layer == 0:
            torch.add(first[stage], turn, out=outgoing[stage])
        else:
            torch.mul(incoming[stage], 5, out=outgoing[stage])

    def count() -> None:
        for stage in range(stages if side.index == 0 else 0):
            times, plus = 1, 0
            for layer in range(layers):
                times, plus = 3 * times, 3 * plus + addend(layer, stage)
                if layer + 1 < layers:
                    times, plus = 5 * times, 5 * plus
            times, plus = (
                (n + (1 << 31)) % (1 << 32) - (1 << 31) for n in (times, plus)
            )  # as int32 has them
            want = (first[stage] + turn) * times + plus
            wrong.add_((incoming[stage] != want).sum())

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def on(stream: Any) -> Any:
        return torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext()

    main, other = (torch.cuda.Stream() if on_gpu else None for _ in range(2))
    with node(side, transport=transport) as own, on(main):
        channels = []
        for stage in range(stages):
            options = {"mode": mode, "timeout_ms": 8000, "name": f"stage {stage}"}
            out, back = [outgoing[stage]], [incoming[stage]]
            if side.index == 0:
                channels.append(own.channel(out, [stage], back, [stage], **options))
            else:
                channels.append(own.channel([stage], out, [stage], push=back, **options))
            assert channels[-1].path == peers.PATHS[mode]

        def body(beside: Any) -> None:
            turn.add_(1)
            for layer in range(layers):
                for stage, ch in enumerate(channels):
                    if side.index == 1 or layer > 0:
                        ch.recv()
                    compute(layer, stage)
                    if beside:
                        beside.wait_stream(main)
                    with on(beside or main):
                        ch.send()
            if side.index == 0:
                for ch in channels:
                    ch.recv()
            count()
            if beside:
                main.wait_stream(beside)

        # All kernels are loaded before one that waits is on a stream.
        for layer in range(2):
            compute(layer, 0)
        count()
        settle()
        wrong.zero_()
        incoming.fill_(peers.POISON)
        settle()
        side.barrier()
        body(None)
        settle()
        side.barrier()
        replay: Callable[[], None] = functools.partial(body, None)
        if on_gpu:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=main):
                body(other if apart else None)
            replay = graph.replay
        side.barrier()
        for _ in range(replays):
            replay()
        settle()
        for ch in channels:
            ch.check()
        assert turn.item() == 1 + replays
        assert wrong.item() == 0, f"{wrong.item()} words of {1 + replays} turns are wrong"
        if side.index == 0:
            # That the count is of the right numbers: once more, step by step.
            x = (first.cpu() + turn.cpu()).to(torch.int64)
            for layer in range(layers):
                for stage in range(stages):
                    x[stage] = 3 * (x[stage] if layer == 0 else 5 * x[stage]) + addend(layer, stage)
                x &= (1 << 32) - 1
            assert torch.equal(incoming.cpu().to(torch.int64) & ((1 << 32) - 1), x)
        side.barrier()
        if on_gpu:
            del graph, replay
        for ch in channels:
            ch.close()
        side.barrier()


@pytest.mark.parametrize("apart", [False, True], ids=["one_stream", "two_streams"])
@pytest.mark.parametrize("mode", ["kernel", "copy"])
def test_layers(pair: Pair, mode: str, apart: bool) -> None:
    """61 layers of 3 micro-batches, 1,000 times where the processes need not take turns."""
    replays = 1000 if at_once(pair.devices) else 1
    pair.run(layered, 40, mode=mode, layers=61, stages=3, replays=replays, apart=apart)


@pytest.mark.parametrize(
    ("apart", "transport"), [(False, "auto"), (True, "auto"), (False, "tcp"), (True, "cma")]
)
def test_layers_by_host(pair: Pair, apart: bool, transport: str) -> None:
    """As test_layers, with a tenth of the layers where the processes have to take turns: the CPU
    has a part in each message."""
    whole = at_once(pair.devices)
    shape = {"layers": 61 if whole else 6, "stages": 3, "replays": 1000 if whole else 20}
    pair.run(layered, 90, mode="host", apart=apart, transport=transport, **shape)


def compiled(side: Side, backend: str, mode: str) -> None:
    """torch.compile takes a whole step."""
    import torch
    import torch._inductor.config

    torch.compiler.reset()
    torch._inductor.config.compile_threads = 1  # in this process
    # The first to have compiled its step waits for the other.
    with node(side) as own, opened(side, own, 4096, mode, 3, timeout_ms=60000) as ch:

        def exchange(x: Any) -> Any:
            ch.outgoing[0].copy_(x)
            torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
            y = torch.empty_like(ch.incoming[0])
            torch.ops.fserver.recv(ch.number, [y], ch.token)
            return y

        def worker(x: Any) -> Any:
            y, z = exchange(x * 2), exchange(x + 1)
            return y + 3 * z  # after both

        def server(x: Any) -> Any:
            for _ in range(2):
                y = torch.empty_like(ch.incoming[0])
                torch.ops.fserver.recv(ch.number, [y], ch.token)
                ch.outgoing[0].copy_(y + x)
                torch.ops.fserver.send(ch.number, ch.outgoing, ch.token)
            return x

        step = torch.compile(worker if side.index == 0 else server, backend=backend, fullgraph=True)
        several = torch.arange(4096.0, device=f"cuda:{side.device}")
        for i in range(5):
            y = step(several + i if side.index == 0 else torch.full_like(several, 10 * i))
            torch.cuda.synchronize()
            if side.index == 0:
                x = several + i
                assert torch.equal(y, 2 * x + 10 * i + 3 * (x + 1 + 10 * i))
        ch.check()
        side.barrier()


@pytest.mark.parametrize("mode", ["kernel", "host"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(pair: Pair, backend: str, mode: str) -> None:
    if backend == "inductor" and not (
        importlib.util.find_spec("triton") and shutil.which(os.environ.get("CC", "gcc"))
    ):
        pytest.skip("inductor needs triton and a C compiler")
    pair.run(compiled, 25 if backend == "aot_eager" else 90, backend=backend, mode=mode)


def opened_in_a_capture(side: Side, mode: str) -> None:
    """It is refused, and the capture goes on; outside, the same channel opens and works."""
    import torch

    import fserver

    where = peers.place(side.device)
    with node(side) as own:
        out, into = torch.zeros(64, device=where), torch.zeros(64, device=where)
        count = torch.zeros(1, device=where)
        options: dict[str, Any] = {"mode": mode, "timeout_ms": 4000, "name": "one"}

        def attempt() -> Any:
            if side.index == 0:
                return own.channel([out], [4], [into], [4], **options)
            return own.channel([4], [out], [4], push=[into], **options)

        peers.warm(out)
        count.add_(1)
        torch.cuda.synchronize()
        side.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            count.add_(1)
            with pytest.raises(fserver.Error, match="capture"):
                attempt()
            count.add_(1)
        side.barrier()
        with attempt() as ch:
            assert ch.path == peers.PATHS[mode]
            for i in range(1, 4):
                into.fill_(peers.POISON)
                torch.cuda.synchronize()
                side.barrier()
                if side.index == 0:
                    out.fill_(i)
                    ch.send()
                ch.recv()
                if side.index == 1:
                    torch.mul(into, 2, out=out)
                    ch.send()
                graph.replay()
                torch.cuda.synchronize()
                assert into.tolist() == [i * (2 - side.index)] * 64
                side.barrier()  # the worker writes to what has been read
            ch.check()
            assert count.item() == 1 + 3 * 2
            side.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_opened_in_a_capture(pair: Pair, mode: str) -> None:
    pair.run(opened_in_a_capture, mode=mode)


def beside_a_wait(side: Side, mode: str) -> None:
    """While a stream waits for a message, another channel closes, and tensors are pushed and their
    receive buffers freed: nobody is kept from the GPU."""
    import torch

    streams = [torch.cuda.Stream() for _ in "12"]
    with node(side, **peers.options(side.device, "auto")) as own, ExitStack() as stack:
        channels = []
        for key, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                channels.append(stack.enter_context(opened(side, own, 64, mode, key)))
        first, second = channels

        def ask(i: int) -> None:
            if side.index == 1:
                batch = own.get_batch()
                own.respond([batch[0][1][0] + 1], batch[0][0], need_event=True)
                return
            x = torch.full((1000 * (i + 1),), float(i), device=peers.place(side.device))
            y = torch.zeros_like(x)
            own.wait(own.push_pull([x], [9], [y], [9]), timeout_ms=3000)
            assert torch.equal(y, x + 1)

        with torch.cuda.stream(streams[0]):
            calls = [first.send, first.recv]
            for call in calls if side.index == 0 else calls[::-1]:
                call()
            ask(0)  # the driver waits where it loads torch's kernels
            streams[0].synchronize()
        with torch.cuda.stream(streams[1]):
            if side.index == 0:
                second.send()
            second.recv()
            if side.index == 1:
                streams[1].synchronize()
        side.barrier()
        first.close()
        with torch.cuda.stream(streams[0]):
            for i in range(1, 4):
                ask(i)
        if side.index == 0:
            assert not streams[1].query()
        side.barrier()
        with torch.cuda.stream(streams[1]):
            if side.index == 1:
                second.outgoing[0].fill_(7)
                second.send()
            streams[1].synchronize()
        if side.index == 0:
            assert second.incoming[0].tolist() == [7] * 64
        second.check()
        side.barrier()


@pytest.mark.parametrize("mode", MODES)
def test_beside_a_wait(pair: Pair, mode: str) -> None:
    pair.run(beside_a_wait, 15, mode=mode)


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


@pytest.mark.parametrize("mode", ["kernel", "copy"])
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
                with pytest.raises(fserver.ConfigError, match="captured in a CUDA graph.* outside"):
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


def captured_beside(side: Side, mode: str) -> int:
    """Captures send and recv in torch's default mode, which lets no thread of the process make a
    call that may disturb a capture, while another thread exchanges tensors for which the engine
    opens buffers. Gives the number of these exchanges."""
    import torch

    ready, over, device = threading.Event(), threading.Event(), peers.place(side.device)
    x, y = (torch.zeros(4096, device=device) for _ in range(2))

    def worker(own: Any) -> int:
        done = 0
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not over.is_set():
                key = 1000 + done % 200
                own.wait(own.push_pull([x], [key], [y], [key]), timeout_ms=4000)
                done += 1
                ready.set()
        return done

    def server(own: Any) -> int:
        done = 0
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream()):
            ready.set()
            while not over.is_set():
                for handler, [got], _ in own.get_batch(timeout_ms=50):
                    own.respond([got], handler, need_event=True)
                    done += 1
        return done

    options = peers.options(side.device, "auto")
    with node(side, **options) as own, torch.cuda.stream(torch.cuda.Stream()):
        with (
            opened(side, own, 4096, mode, 5) as ch,
            ThreadPoolExecutor(1) as one,
            ExitStack() as end,
        ):
            end.callback(over.set)  # whatever comes, the thread ends
            count, wrong = (torch.zeros((), device=device) for _ in range(2))

            def step() -> None:
                count.add_(1)
                if side.index == 0:
                    ch.outgoing[0].copy_(count.expand(4096))
                    ch.send()
                    ch.recv()
                    wrong.add_((ch.incoming[0] != count + 1).sum())
                else:
                    ch.recv()
                    torch.add(ch.tensors[0][0], 1, out=ch.outgoing[0])
                    ch.send()

            step()
            beside = one.submit(worker if side.index == 0 else server, own)
            assert ready.wait(5)
            graphs = []
            for _ in range(20):
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], stream=torch.cuda.current_stream()):
                    step()
                graphs[-1].replay()
                side.barrier()
            torch.cuda.current_stream().synchronize()
            ch.check()
            assert (count.item(), wrong.item()) == (21, 0)
            if side.index == 0:
                over.set()
                beside.result(5)
                side.barrier()  # it asks for no more
            else:
                side.barrier()
                over.set()
            done = beside.result(5)
            side.barrier()
            del graphs
    return done


@pytest.mark.parametrize("mode", MODES)
def test_captured_beside_others(pair: Pair, mode: str) -> None:
    asked, answered = pair.run(captured_beside, 30, mode=mode)
    assert asked == answered > 20
