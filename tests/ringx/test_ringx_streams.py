"""What needs a GPU: attention by copies between four ranks on as many GPUs as there are (ranks are
threads, each with streams of its own, so that copies and kernels run beside each other as they do
between processes), and a call in the capture of a graph.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fserver.errors import ConfigError
from fserver.ringx import kernels, positions, ringx_attention, schedules
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.copies import copies
from fserver.ringx.kernels import Given
from fserver.ringx.schedules import Job

RANKS, ROWS, HEADS, KV_HEADS, DIM = 4, 1024, 4, 2, 64

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


class Shared:
    """What all threads see."""

    def __init__(self, room: int):
        count = torch.cuda.device_count()
        self.devices = [torch.device("cuda", rank % count) for rank in range(RANKS)]
        self.memory = [
            {
                name: torch.full((room,), 255, dtype=torch.uint8, device=at)
                for name in ("keys", "grads")
            }
            for at in self.devices
        ]
        self.came: list[Any] = [None] * RANKS
        self.all = threading.Barrier(RANKS, timeout=60)


class Window:
    """What `fserver.ringx.window.Window` does, with fences of events. Memory is NaN at first."""

    def __init__(self, shared: Shared, rank: int):
        self._shared, self._rank, self._turn = shared, rank, rank
        self._stream = torch.cuda.Stream(shared.devices[rank], priority=-1)

    def of(
        self, rank: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0
    ) -> Tensor:
        size = torch.Size(shape).numel()
        return self._shared.memory[rank][name].view(dtype)[start : start + size].view(shape)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._be_late()
            yield

    def _be_late(self) -> None:
        """By some ten milliseconds, more than a host needs for the calls that follow; every third
        time, and each rank another time."""
        self._turn += 1
        if self._turn % 3 == 0:
            torch.cuda._sleep(20_000_000)

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def fence(self) -> None:
        self._be_late()
        shared, here = self._shared, torch.cuda.current_stream()
        shared.came[self._rank] = here.record_event()
        shared.all.wait()
        for event in shared.came:
            here.wait_event(event)
        shared.all.wait()

    @contextmanager
    def call(self) -> Iterator[None]:
        yield
        torch.cuda.current_stream().wait_stream(self._stream)


def whole(seed: int, causal: bool) -> list[Tensor]:
    """q, k, v, the gradient of out, out, dq, dk and dv of one GPU, in float32."""
    torch.manual_seed(seed)
    shapes = [(1, RANKS * ROWS, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16).float() for s in shapes)
    out, lse = kernels.forward(q, k, v, causal, DIM**-0.5)
    grads = kernels.backward(Given(dout, q, k, v, out.contiguous(), lse), causal, DIM**-0.5)
    torch.cuda.synchronize()
    return [q, k, v, dout, out, *grads]


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["X4", "X3b"])
def test_four_ranks(algorithm: str, together: int) -> None:
    """Calls with other numbers right behind each other; every rank against its rows of one GPU."""
    how = ALGORITHMS[algorithm]
    causal = True in how.masks
    problems = [whole(seed, causal) for seed in range(6)]
    shared = Shared(2 * together * 2 * ROWS * KV_HEADS * DIM * 2)

    # Here, and each GPU to each: the first copies between two GPUs are not for many threads.
    parts = []
    for me, device in enumerate(shared.devices):
        mine = positions(RANKS * ROWS, how.layout(causal), me, RANKS, "cuda:0")
        rows = [[t[:, mine].to(torch.bfloat16) for t in tensors[:4]] for tensors in problems]
        parts.append([[t.to(device) for t in tensors] for tensors in rows])
        for other in shared.devices:
            torch.zeros(1, device=device).to(other)
    for device in shared.devices:
        torch.cuda.synchronize(device)

    def rank(me: int) -> list[list[Tensor]]:
        device, found = shared.devices[me], []
        torch.cuda.set_device(device)
        window: Any = Window(shared, me)
        exchange = partial(copies, together=together)
        ranks: Any = SimpleNamespace(rank=me, size=RANKS)
        lengths = [ROWS] * RANKS
        blocks = how.masks[causal]
        job = Job(ranks, blocks, DIM**-0.5, lengths, lengths, torch.float32, torch.bfloat16, window)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for q, k, v, dout in parts[me]:
                with window.call():
                    out, lse = schedules.forward(job, q, k, v, exchange)
                given = Given(dout, q, k, v, out.contiguous(), lse)
                with window.call():
                    found.append([out, *schedules.backward(job, given, exchange)])
        torch.cuda.synchronize(device)
        return found

    with ThreadPoolExecutor(RANKS) as threads:
        answers = [*threads.map(rank, range(RANKS))]
    for me, found in enumerate(answers):
        mine = positions(RANKS * ROWS, how.layout(causal), me, RANKS, "cuda:0")
        for number, (got, (*_, out, dq, dk, dv)) in enumerate(zip(found, problems, strict=True)):
            for name, a, b in zip(("out", "dq", "dk", "dv"), got, (out, dq, dk, dv), strict=True):
                want = b[:, mine]
                error = (a.to("cuda:0").float() - want).abs().max() / want.abs().max()
                assert error < 2e-2, (me, number, name, float(error))


def capture() -> None:
    """In a process of its own: the group is the default one."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    x = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    want = ringx_attention(x, x, x, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ConfigError, match="agreed False in the capture"):
            ringx_attention(x, x, x, causal=True, agreed=False)
        found = ringx_attention(x, x, x, causal=True)
    graph.replay()
    assert found.equal(want)
    dist.destroy_process_group()


def test_refusal_in_a_capture_leaves_it_valid() -> None:
    code = "from test_ringx_streams import capture; capture()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=os.path.dirname(__file__),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
