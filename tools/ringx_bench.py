#!/usr/bin/env python3
"""Times attention over several GPUs: ringx, others' ways, and a GPU alone, in one run.

    torchrun --nproc-per-node 4 tools/ringx_bench.py time --tokens 32K,64K --json time-4.json
    NCCL_P2P_DISABLE=1 torchrun ... tools/ringx_bench.py time --label "slow link" ...

The heads are those of Llama-3-8B (32 and 8, of 128) under a causal mask, and 32 of each without
one. Every way runs on the same kernel. "ideal" is the time of one GPU for the whole sequence,
divided by the number of GPUs. Without GPUs it runs over gloo, to try the program.
tests/ringx/test_ringx_ranks.py checks the answers of all ways.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from ringx_ways import KERNELS, Way, ways
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fserver.ringx import api, kernels, positions
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.ranks import Ranks
from fserver.ringx.window import Window, known


def timed(call: Callable[[], None], on_gpu: bool, warmup: int, count: int, in_a_row: int) -> float:
    """Median milliseconds of a call on the slowest rank, of so many in a row as in the layers of a
    model. All ranks start together."""
    took = []
    for _ in range(warmup + count):
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        begin = time.perf_counter()
        for _ in range(in_a_row):
            call()
        ms = (time.perf_counter() - begin) * 1e3
        if on_gpu:
            end.record()
            end.synchronize()
            ms = start.elapsed_time(end)
        took.append(ms / in_a_row)
    slowest = torch.tensor(took[warmup:], device="cuda" if on_gpu else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


@contextmanager
def without_collectives() -> Iterator[None]:
    """Schedules exchange nothing and work on whatever is there."""
    done, of = SimpleNamespace(wait=lambda: None), Window.of
    names = ("broadcast", "sum_at", "maximum", "gather", "scatter_sum")

    def mine(window: Window, rank: int, *what: Any) -> Tensor:
        return of(window, dist.get_rank(), *what)

    def agree(ranks: Ranks, device: torch.device, facts: list[int], *_: Any) -> list[list[int]]:
        return [[fact] * ranks.size for fact in facts[-2:]]

    with (
        mock.patch.multiple(Ranks, **{name: lambda *_: done for name in names}),
        mock.patch.multiple(Window, fence=lambda window: None, of=mine),
        mock.patch.object(api, "agree", agree),
    ):
        yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """Schedules exchange and merge, and the kernels do nothing."""

    def forward(q: Tensor, *_: Any) -> kernels.Pair:
        return torch.empty_like(q), torch.empty_like(q[..., 0].mT, dtype=torch.float32)

    def backward(given: kernels.Given, *_: Any) -> list[Tensor]:
        return [torch.empty_like(t) for t in given[1:4]]

    with mock.patch.multiple(kernels, forward=forward, backward=backward):
        yield


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All ways at all lengths."""
    rows, on_gpu = [], device.type == "cuda"
    dtype, dim = (torch.bfloat16, 128) if on_gpu else (torch.float32, 16)
    for tokens in map(size_of, options.tokens.split(",")):
        for causal in {"causal": (True,), "full": (False,), "both": (True, False)}[options.mask]:
            generator = torch.Generator(device).manual_seed(tokens)
            heads = (32, 8, 8, 32) if causal else (32,) * 4  # of q, k, v and the gradient of out
            whole = [
                torch.randn(1, tokens, n, dim, device=device, generator=generator).to(dtype)
                for n in heads
            ]
            ideal: dict[str, float] = {}
            for way in ways(causal, tokens, device):
                if options.ways and way.name not in (*options.ways.split(","), "alone"):
                    continue
                with sdpa_kernel(KERNELS[options.kernel]) if on_gpu else nullcontext():
                    rows.append(measure_one(options, way, whole, causal, ideal))
                say(json.dumps(rows[-1]))
                if on_gpu:
                    torch.cuda.empty_cache()
    return rows


def measure_one(
    options: argparse.Namespace, way: Way, whole: list[Tensor], causal: bool,
    ideal: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """One row: forward, and forward with backward. `ideal` is set by the GPU alone."""
    size, (_, tokens, heads, dim), on_gpu = dist.get_world_size(), whole[0].shape, whole[0].is_cuda
    few = way.whole and tokens > 128 << 10  # it is steady, and takes long
    warmup, count = (2, 5) if few else (options.warmup, options.iterations)
    row: dict[str, Any] = {
        "way": way.name, "tokens": tokens, "ranks": size, "causal": causal, "heads": heads,
        "kv_heads": whole[1].shape[2], "label": options.label, "kernel": options.kernel,
        "iterations": count, "in_a_row": options.in_a_row,
    }  # fmt: skip
    ranks, rank = (1, 0) if way.whole else (size, dist.get_rank())
    where = positions(tokens, way.layout, rank, ranks, whole[0].device)
    parts = whole if way.whole else [t[:, where] for t in whole]
    q, k, v = (t.detach().requires_grad_() for t in parts[:3])

    def forward() -> None:
        with torch.no_grad():
            way.attend(q, k, v)

    def both() -> None:
        torch.autograd.grad(way.attend(q, k, v), (q, k, v), parts[3])

    flop = 4 * tokens**2 * heads * dim * (0.5 if causal else 1) / ranks
    try:
        with way.around():
            used = torch.cuda.memory_allocated() if on_gpu else 0
            for name, call, work in (("forward", forward, 1), ("both", both, 3.5)):
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                took = row[f"{name}_ms"] = timed(call, on_gpu, warmup, count, options.in_a_row)
                if on_gpu:
                    peak = torch.cuda.max_memory_allocated() - used
                    row[f"{name}_peak_gb"] = round(peak / 1e9, 3)
                row[f"{name}_tflops_per_gpu"] = flop * work / took / 1e9
                if way.whole:
                    ideal[name] = took / size
                if name in ideal:  # it is not if the GPU alone has failed
                    row[f"{name}_of_ideal"] = ideal[name] / (took / size if way.whole else took)
                if way.name.split()[0] in ALGORITHMS and options.parts:
                    for context in (without_collectives, without_kernels):
                        with context():
                            some = timed(call, on_gpu, 2, 5, options.in_a_row)
                        row[f"{name}_{context.__name__}_ms"] = some
            window = known(Ranks(dist.group.WORLD)) if "copies" in way.name else None
            if window:
                row["window_gb"] = round(window.size / 1e9, 3)  # beside the peaks, kept since then
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:500]}"
    return row


def summary(rows: list[dict[str, Any]]) -> None:
    """A table of milliseconds and percents of the ideal."""
    say(f"table {'way':<16}{'tokens':>8}{'forward':>10}{'ideal':>7}{'both':>10}{'ideal':>7}")
    for row in rows:
        cells = "".join(
            f"{row.get(f'{name}_ms', 0):10.3f}{row.get(f'{name}_of_ideal', 0):7.1%}"
            for name in ("forward", "both")
        )
        say(f"table {row['way']:<16}{row['tokens']:>8}{cells}  {row.get('failed', '')}")


def size_of(text: str) -> int:
    """8K is 8,192."""
    return int(text.rstrip("Kk")) << (10 if text[-1] in "Kk" else 0)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("time",))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--tokens", default="8K,32K,64K,128K,256K", help="of the whole sequence")
    parser.add_argument("--mask", choices=("causal", "full", "both"), default="causal")
    parser.add_argument("--ways", help="only these, by name, with commas")
    parser.add_argument("--kernel", choices=[*KERNELS], default="cudnn")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--in-a-row", type=int, default=1, help="calls that are timed together")
    parser.add_argument("--label", default="", help="for the rows: what is special about this run")
    parser.add_argument("--parts", action="store_true", help="also without collectives, or kernels")
    options = parser.parse_args()
    device, group = torch.device("cpu"), {"backend": "gloo"}
    machine = {
        "torch": torch.__version__,
        "environment": {n: v for n, v in os.environ.items() if "NCCL_" in n},
        "command": sys.argv[1:],
    }
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        group = {"backend": "nccl", "device_id": device}
        machine["device"] = torch.cuda.get_device_name()
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    dist.init_process_group(**group, timeout=timedelta(minutes=3))
    rows = measure(options, device)
    summary(rows)
    if options.json and dist.get_rank() == 0:
        Path(options.json).write_text(json.dumps({"rows": rows, "machine": machine}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
