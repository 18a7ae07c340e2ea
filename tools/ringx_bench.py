#!/usr/bin/env python3
"""Attention over several GPUs: ringx, what others do, and a GPU alone, in one run.

    torchrun --nproc-per-node 4 tools/ringx_bench.py check --json check.json
    torchrun --nproc-per-node 4 tools/ringx_bench.py time --tokens 32K,64K --json time-4.json
    NCCL_P2P_DISABLE=1 torchrun ... tools/ringx_bench.py time --label "slow link" ...
    python tools/ringx_bench.py plot results.png time-2.json time-4.json

``check`` compares with float64 and prints PASS or FAIL, ``graph`` replays calls from CUDA graphs;
``time`` measures. Heads are those of
Llama-3-8B (32 and 8, of 128) under a causal mask and 32 of each without one. Every way runs on the
same kernel. "ideal" is the time of one GPU for the whole sequence, divided by the GPUs. Without
GPUs all of it runs over gloo, for a look at the program. ``check --shared`` has all ranks share the
first GPU, over gloo and by copies, which wants NVIDIA's multi-process service (MPS).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from ringx_check import check, graph, say
from ringx_exact import exact, local, off, relative, tensors
from ringx_ways import KERNELS, Way, ways
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fserver.ringx import api, kernels, window
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.kernels import Given, Pair, Triple
from fserver.ringx.ranks import Ranks
from fserver.ringx.window import Window, known


def timed(
    call: Callable[[], None], device: torch.device, warmup: int, count: int, in_a_row: int = 1
) -> list[float]:
    """Milliseconds of a call on the slowest rank, of so many in a row as in the layers of a model;
    all ranks start together."""
    took = []
    for index in range(warmup + count):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(in_a_row):
                call()
            end.record()
            end.synchronize()
            ms = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            for _ in range(in_a_row):
                call()
            ms = (time.perf_counter() - begin) * 1e3
        if index >= warmup:
            took.append(ms / in_a_row)
    slowest = torch.tensor(took, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


class Nothing:
    """Work that is done."""

    def wait(self) -> None:
        pass


@contextmanager
def without_collectives() -> Iterator[None]:
    """Schedules exchange nothing and work on whatever is there."""
    names = ("broadcast", "sum_at", "maximum", "gather", "scatter_sum")
    before = {name: getattr(Ranks, name) for name in names}
    agree, fence, of = api.agree, Window.fence, Window.of
    Window.fence = lambda window: None
    Window.of = lambda window, rank, *what: of(window, dist.get_rank(), *what)
    api.agree = lambda ranks, device, facts, *_: (
        [facts[-2]] * ranks.size,
        [facts[-1]] * ranks.size,
    )
    for name in names:
        setattr(Ranks, name, lambda *_: Nothing())
    try:
        yield
    finally:
        api.agree, Window.fence, Window.of = agree, fence, of
        for name in names:
            setattr(Ranks, name, before[name])


@contextmanager
def without_kernels() -> Iterator[None]:
    """Schedules exchange and merge, and the kernels do nothing."""
    before = kernels.forward, kernels.backward

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        return torch.empty_like(q), lse

    def backward(given: Given, causal: bool, scale: float) -> Triple:
        return torch.empty_like(given.q), torch.empty_like(given.k), torch.empty_like(given.v)

    kernels.forward, kernels.backward = forward, backward
    try:
        yield
    finally:
        kernels.forward, kernels.backward = before


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All ways at all lengths."""
    rows = []
    backend = KERNELS[options.kernel] if device.type == "cuda" else None
    dim = 128 if device.type == "cuda" else 16
    for tokens in options.tokens:
        for causal in (True, False) if options.mask == "both" else (options.mask == "causal",):
            whole = tensors(tokens, 32, 8 if causal else 32, dim, options.dtype, device)
            generator = torch.Generator(device).manual_seed(1)
            sample = torch.randint(tokens, (64,), device=device, generator=generator)
            want = exact(whole, causal, sample)
            ideal: dict[str, float] = {}
            for way in ways(causal, tokens, dist.get_world_size(), device):
                if options.ways and way.name not in (*options.ways, "alone"):
                    continue
                with sdpa_kernel(backend) if backend else nullcontext():
                    row = measure_one(options, way, whole, causal, device, sample, want, ideal)
                rows.append(row)
                say(json.dumps(row))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows


def measure_one(
    options: argparse.Namespace, way: Way, whole: list[Tensor], causal: bool, device: torch.device,
    sample: Tensor, want: dict[str, Tensor], ideal: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """One row: forward, and forward with backward."""
    size, (_, tokens, heads, dim) = dist.get_world_size(), whole[0].shape
    row: dict[str, Any] = {
        "way": way.name, "tokens": tokens, "ranks": size, "causal": causal, "heads": heads,
        "kv_heads": whole[1].shape[2], "label": options.label, "kernel": options.kernel,
    }  # fmt: skip
    flop = 4 * tokens**2 * heads * dim * (0.5 if causal else 1)
    few = way.whole and tokens > 128 << 10  # it is steady, and takes long
    warmup, count = (2, 5) if few else (options.warmup, options.iterations)
    row["iterations"], row["in_a_row"] = count, options.in_a_row
    try:
        with ExitStack() as stack:
            parts, where = local(whole, way)
            stack.enter_context(way.around())

            def forward() -> None:
                with torch.no_grad():
                    way.attend(*parts[:3])

            def both() -> None:
                torch.autograd.grad(way.attend(*parts[:3]), parts[:3], parts[3])

            used = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            for name, call, work in (("forward", forward, 1), ("both", both, 3.5)):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                took = statistics.median(timed(call, device, warmup, count, options.in_a_row))
                if device.type == "cuda":
                    peak = torch.cuda.max_memory_allocated() - used
                    row[f"{name}_peak_gb"] = round(peak / 1e9, 3)
                ranks = 1 if way.whole else size
                row[f"{name}_ms"] = took
                row[f"{name}_tflops_per_gpu"] = flop * work / took / 1e9 / ranks
                if way.whole:
                    ideal[name] = took / size
                if name in ideal:
                    row[f"{name}_of_ideal"] = ideal[name] / (took / size if way.whole else took)
                if way.name.split()[0] in ALGORITHMS and options.parts:
                    for context in (without_collectives, without_kernels):
                        with context():
                            some = timed(call, device, 2, 5, options.in_a_row)
                        row[f"{name}_{context.__name__}_ms"] = statistics.median(some)
            window = known(Ranks(dist.group.WORLD)) if "copies" in way.name else None
            if window:
                row["window_gb"] = round(window.size / 1e9, 3)  # beside the peaks, kept since then
            out = way.attend(*parts[:3])
            dq = torch.autograd.grad(out, parts[0], parts[3])[0]
            sums = {}
            places = (where[None] == sample[:, None]).nonzero()  # of the sample, in these rows
            for name, got in (("out", out), ("dq", dq)):
                sums[name] = off(got[:, places[:, 1]], want[name][:, places[:, 0]])
            row["errors"] = {name: relative(value) for name, value in sums.items()}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:500]}"
    return row


def draw(path: str, files: list[str]) -> None:
    """Share of the ideal over the length, a panel for each run and direction."""
    from matplotlib.figure import Figure

    runs = [json.loads(Path(name).read_text()) for name in files]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for row in run["rows"]:
            groups.setdefault((row["ranks"], row["label"], row["causal"]), []).append(row)
    figure = Figure(figsize=(12, 4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (key, rows), line in zip(groups.items(), panels, strict=True):
        for name, axes in zip(("forward", "both"), line, strict=True):
            for way in dict.fromkeys(row["way"] for row in rows):
                some = sorted(
                    (row["tokens"], row[f"{name}_of_ideal"])
                    for row in rows
                    if row["way"] == way and f"{name}_of_ideal" in row
                )
                if some and way != "alone":
                    style = "o-" if way in ALGORITHMS else "s--"
                    axes.plot(*zip(*some, strict=True), style, label=way)
            mask = "causal" if key[2] else "full mask"
            what = "forward" if name == "forward" else "forward and backward"
            axes.set(title=f"{key[0]} GPUs, {mask}, {what} {key[1]}".strip(), ylim=(0, None))
            axes.set(xlabel="tokens", ylabel="share of one GPU / N", xscale="log")
            axes.set_xscale("log", base=2)
            axes.axhline(1, color="gray", linewidth=0.8)
            axes.axhline(0.95, color="gray", linewidth=0.8, linestyle=":")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def summary(rows: list[dict[str, Any]]) -> None:
    """A table, and for each length whether X3 and X4 reach 95 % of the ideal and lead torch."""
    say(f"table {'way':<16}{'tokens':>8}{'forward':>10}{'ideal':>7}{'both':>10}{'ideal':>7}  error")
    for row in rows:
        cells = ""
        for name in ("forward", "both"):
            cells += f"{row.get(name + '_ms', 0):10.3f}{row.get(name + '_of_ideal', 0):7.1%}"
        errors = " ".join(f"{n} {e:.1e}" for n, e in row.get("errors", {}).items())
        said = row.get("failed") or errors
        say(f"table {row['way']:<16}{row['tokens']:>8}{cells}  {said}")
    for tokens in dict.fromkeys(row["tokens"] for row in rows if row["causal"]):
        some = [row for row in rows if row["tokens"] == tokens and row["causal"]]
        for name in ("forward", "both"):
            share = {row["way"]: row.get(f"{name}_of_ideal", 0) for row in some}
            best = {way: share.get(way, 0) for way in ("X3", "X4")}
            best["torch"] = max(share.get(f"torch {how}", 0) for how in ("allgather", "alltoall"))
            ours = min(best["X3"], best["X4"])
            verdict = "met" if ours >= 0.95 and ours > best["torch"] > 0 else "missed"
            shares = ", ".join(f"{who} {share:.1%}" for who, share in best.items())
            say(f"table target {verdict} (95 %, ahead of torch): {tokens} {name}: {shares}")


def size_of(text: str) -> int:
    """8K is 8,192."""
    return int(text.upper().removesuffix("K")) * (1024 if text.upper().endswith("K") else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check")
    graphs = commands.add_parser("graph")
    timing = commands.add_parser("time")
    drawing = commands.add_parser("plot")
    drawing.add_argument("file")
    drawing.add_argument("results", nargs="+")
    for command in (checking, graphs, timing):
        command.add_argument("--json", metavar="FILE")
    checking.add_argument("--shared", action="store_true", help="one GPU for all ranks")
    timing.add_argument("--tokens", default="8K,32K,64K,128K,256K", help="of the whole sequence")
    timing.add_argument("--mask", choices=("causal", "full", "both"), default="causal")
    timing.add_argument("--ways", help="only these, by name, with commas")
    timing.add_argument("--kernel", choices=[*KERNELS], default="cudnn")
    timing.add_argument("--iterations", type=int, default=20)
    timing.add_argument("--warmup", type=int, default=5)
    timing.add_argument("--in-a-row", type=int, default=1, help="calls that are timed together")
    timing.add_argument("--label", default="", help="for the rows: what is special about this run")
    timing.add_argument("--parts", action="store_true", help="also without collectives, or kernels")
    options = parser.parse_args()
    if options.command == "plot":
        draw(options.file, options.results)
        return 0

    device = torch.device("cpu")
    if options.command == "graph" and not torch.cuda.is_available():
        parser.error("graph: there is no GPU")
    shared = options.command == "check" and options.shared
    if torch.cuda.is_available():
        device = torch.device("cuda", 0 if shared else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if shared:  # NCCL wants a GPU for each rank, and so does a window
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        window._reach = lambda ranks, device: True
    nccl = device.type == "cuda" and not shared
    group = {"backend": "nccl", "device_id": device} if nccl else {"backend": "gloo"}
    dist.init_process_group(**group, timeout=timedelta(minutes=3))
    good = True
    if options.command == "check":
        # of a rank: tokens, and heads of q and of k and v; one length is no multiple of a block
        options.shapes = [(1024, 8, 2), (1000, 4, 4)] if device.type == "cuda" else [(64, 4, 2)]
        options.long = [(8192, 4, 2), (8192, 4, 4)] if device.type == "cuda" else []
        rows = check(options, device)
        failed = sum(not row["pass"] for row in rows)
        say(f"{'FAIL' if failed else 'PASS'} ringx check: {failed} of {len(rows)} failed")
        good = not failed
    elif options.command == "graph":
        rows = graph(options, device)
        good = all(row["pass"] for row in rows)
    else:
        options.tokens = [size_of(text) for text in options.tokens.split(",")]
        options.ways = options.ways.split(",") if options.ways else None
        options.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        rows = measure(options, device)
        summary(rows)
    if options.json and dist.get_rank() == 0:
        machine = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "",
            "environment": {n: v for n, v in os.environ.items() if "NCCL_" in n},
            "command": sys.argv[1:],
        }
        Path(options.json).write_text(json.dumps({"rows": rows, "machine": machine}, indent=1))
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
