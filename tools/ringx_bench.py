#!/usr/bin/env python3
"""Times attention over several GPUs: ringx, torch's context_parallel, and a GPU alone, in one run.

    torchrun --nproc-per-node 4 tools/ringx_bench.py --tokens 32K,64K --json time-4.json
    NCCL_P2P_DISABLE=1 torchrun ... tools/ringx_bench.py ...

The heads are those of Llama-3-8B (32 and 8, of 128) under a causal mask, and 32 of each without
one. "ideal" is the time of one GPU for the whole sequence, divided by the number of GPUs. Without
GPUs it runs over gloo. tests/ringx/test_ringx_ranks.py checks the answers of all ways.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fserver.bench import report
from fserver.bench.options import listed, one_of, parser, positive, size
from fserver.ringx import positions, ringx_attention
from fserver.ringx.algorithms import ALGORITHMS

WARM = 5  # calls
PARSER = parser(
    "ringx_bench.py",
    __doc__.splitlines()[0],
    ("--tokens", listed(size), "8K,32K,64K,128K,256K", "of the whole sequence; 8K is 8,192"),
    ("--mask", one_of("causal", "full"), "causal", "causal or full"),
    ("--ways", listed(str), None, "only these, by name, with commas"),
    ("--iterations", positive, 20, "timed calls"),
    ("--graph", bool, False, "times replays of a CUDA graph of each call"),
)
TABLE = ("way", "tokens", "forward_ms", "forward_of_ideal", "both_ms", "both_of_ideal")


class Method(NamedTuple):
    """How to compute attention over all ranks, from and to local [B, S, H, D]."""

    name: str
    layout: str
    attend: Callable[[Tensor, Tensor, Tensor], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # open meanwhile
    of: str = "ringx"  # or "torch"; "alone": each rank takes the whole sequence


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention, [B, S, H, D]."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


@contextmanager
def context_parallel(rotation: str, causal: bool, where: Tensor) -> Iterator[None]:
    """torch's own. A buffer of positions is all that it gets to shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    mesh, settings = init_device_mesh(where.device.type, (dist.get_world_size(),)), _attention
    settings.set_rotate_method(rotation)
    with (
        mock.patch.object(settings._cp_options, "enable_load_balance", causal),
        context_parallel(mesh, buffers=[where], buffer_seq_dims=[0]),
    ):
        yield


def methods(causal: bool, tokens: int, device: torch.device) -> Iterator[Method]:
    """All that is compared, the GPU alone first. An option is named in the name."""
    local = partial(alone, causal=causal)
    yield Method("alone", "contiguous", local, of="alone")
    for name, how in ALGORITHMS.items():
        for copies in (False, True)[: 1 + bool(how.together)] if causal in how.masks else ():
            attend = partial(ringx_attention, algorithm=name, causal=causal, copies=copies)
            yield Method(f"{name} copies" if copies else name, how.layout(causal), attend)
    for rotation in ("allgather", "alltoall"):
        around = partial(context_parallel, rotation, causal, torch.arange(tokens, device=device))
        layout = "zigzag" if causal else "contiguous"
        yield Method(f"torch {rotation}", layout, local, around, of="torch")


def timed(call: Callable[[], object], count: int, on_gpu: bool) -> float:
    """Median milliseconds of a call on the slowest rank. All ranks start together."""
    took = []
    for _ in range(WARM + count):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        begin = time.perf_counter()
        call()
        ms = (time.perf_counter() - begin) * 1e3
        if on_gpu:
            end.record()
            end.synchronize()
            ms = start.elapsed_time(end)
        took.append(ms)
    slowest = torch.tensor(took[WARM:], device="cuda" if on_gpu else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Captures the call in a CUDA graph. Returns what replays it, with no work on the CPU."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        # Other threads, such as NCCL's, may call the driver meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            call()
    torch.cuda.synchronize()
    return graph.replay


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    on_gpu, causal = device.type == "cuda", options.mask == "causal"
    dtype, dim = (torch.bfloat16, 128) if on_gpu else (torch.float32, 16)
    for tokens in options.tokens:
        generator = torch.Generator(device).manual_seed(tokens)
        heads = (32, 8, 8, 32) if causal else (32,) * 4  # of q, k, v and the gradient of out
        shapes = [(1, tokens, n, dim) for n in heads]
        whole = [torch.randn(s, device=device, generator=generator).to(dtype) for s in shapes]
        ideal: dict[str, float] = {}
        for method in methods(causal, tokens, device):
            if method.name in ("alone", *(options.ways or [method.name])):
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else nullcontext():
                    yield measure_one(options, method, whole, ideal)
                torch.cuda.empty_cache()


def measure_one(
    options: argparse.Namespace, method: Method, whole: list[Tensor], ideal: dict[str, float]
) -> dict[str, Any]:
    """One row: forward, and forward with backward. `ideal` is set by the GPU alone."""
    size, (_, tokens, heads, dim), on_gpu = dist.get_world_size(), whole[0].shape, whole[0].is_cuda
    causal, shared = options.mask == "causal", method.of != "alone"
    row: dict[str, Any] = {**vars(options), "way": method.name, "tokens": tokens, "ranks": size}
    row |= {"causal": causal, "heads": heads, "kv_heads": whole[1].shape[2]}
    ranks, rank = (size, dist.get_rank()) if shared else (1, 0)
    where = positions(tokens, method.layout, rank, ranks, whole[0].device)
    q, k, v, dout = (t[:, where].detach() if shared else t.detach() for t in whole)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(method.attend(*leaves), leaves, dout)

    forward = partial(torch.no_grad()(method.attend), *leaves)
    flop = 4 * tokens**2 * heads * dim * (0.5 if causal else 1) / ranks
    try:
        with method.around():
            used = torch.cuda.memory_allocated()
            for name, call, work in (("forward", forward, 1), ("both", both, 3.5)):
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                if options.graph:
                    call = captured(call)
                took = row[f"{name}_ms"] = timed(call, options.iterations, on_gpu)
                row[f"{name}_peak_gb"] = (torch.cuda.max_memory_allocated() - used) / 1e9
                row[f"{name}_tflops_per_gpu"] = flop * work / took / 1e9
                alone_ms = ideal.setdefault(name, took if not shared else math.nan)
                row[f"{name}_of_ideal"] = alone_ms / (took * size if shared else took)
    except Exception as error:
        row["skipped"] = f"{type(error).__name__}: {str(error)[:500]}"
    return row


def main() -> None:
    options = PARSER.parse_args()
    on_gpu = torch.cuda.is_available()
    if options.graph and not on_gpu:
        PARSER.error("--graph needs GPUs, and torch.cuda.is_available() is false")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = {"backend": "nccl", "device_id": device} if on_gpu else {"backend": "gloo"}
    dist.init_process_group(**group, timeout=timedelta(minutes=3))
    machine = {
        "torch": torch.__version__,
        "environment": {name: text for name, text in os.environ.items() if "NCCL_" in name},
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "nccl": torch.cuda.nccl.version() if on_gpu else None,
    }
    table, rows = report.Table(TABLE) if dist.get_rank() == 0 else None, []
    for row in measure(options, device):
        rows.append(row)
        if table:
            table.add({**dict.fromkeys(TABLE), **row})
    if options.json and table:
        report.save(options.json, {"rows": rows, "machine": machine})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
