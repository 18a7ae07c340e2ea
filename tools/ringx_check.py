"""`ringx_bench.py check` and `graph`: whether answers are right."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ringx_exact import exact_all, local, off, relative, tensors
from ringx_ways import KERNELS, Way, of_ringx, ways
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fserver.errors import ConfigError
from fserver.ringx.algorithms import ALGORITHMS


def check(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Each algorithm under each kernel and type: errors against float64 on each rank, where twice
    those of a GPU alone in the same rows are allowed. Long parts under the first of them only."""
    rows: list[dict[str, Any]] = []
    size = dist.get_world_size()
    types = (torch.bfloat16, torch.float16, torch.float32)
    chosen = KERNELS if device.type == "cuda" else {"cpu": None}
    for kernel, backend in chosen.items():
        for dtype in types:
            if kernel in ("cudnn", "flash") and dtype is torch.float32:
                continue
            shapes = options.shapes + (options.long if not rows else [])
            for tokens, heads, kv_heads in shapes:
                for causal in (True, False):
                    with sdpa_kernel(backend) if backend else nullcontext():
                        rows += check_one(
                            kernel, dtype, tokens * size, heads, kv_heads, causal, device
                        )
    return rows


def check_one(
    kernel: str, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, causal: bool,
    device: torch.device,
) -> list[dict[str, Any]]:  # fmt: skip
    whole = tensors(tokens, heads, kv_heads, 128 if device.type == "cuda" else 16, dtype, device)
    want = exact_all(whole, causal)
    single: dict[str, Tensor] = {}
    found = []
    by_gloo = device.type == "cuda" and dist.get_backend() == "gloo"  # it sends nothing of a GPU
    for way in ways(causal, tokens, dist.get_world_size(), device):
        ours = way.name.removesuffix(" copies") in ALGORITHMS
        if not (ours or way.name == "alone" or way.name == "ring p2p" and not by_gloo):
            continue
        row = {
            "way": way.name, "kernel": kernel, "dtype": str(dtype).partition(".")[2],
            "tokens": tokens, "heads": heads, "kv_heads": kv_heads, "causal": causal,
            "ranks": dist.get_world_size(),
        }  # fmt: skip
        text = " ".join(str(value) for value in row.values())
        try:
            parts, where = local(whole, way)
            out = way.attend(*parts[:3])
            got = {"out": out, **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(
                out, parts[:3], parts[3]), strict=True))}  # fmt: skip
            single = single or got  # the GPU alone comes first
            errors, limits, good = {}, {}, True
            for name in want:
                right, alone = want[name][:, where], single[name][:, where]
                mine, allowed = off(got[name], right), off(alone, right)
                good &= bool(mine[0] <= 4 * allowed[0])
                errors[name], limits[name] = relative(mine), 2 * relative(allowed)
            verdicts = torch.tensor([good], device=device, dtype=torch.int32)
            dist.all_reduce(verdicts, dist.ReduceOp.MIN)
        except Exception as error:  # a kernel may refuse, and says so before anything is sent
            refused = isinstance(error, ConfigError)
            row |= {"pass": refused, "error": f"{type(error).__name__}: {error}"}
        else:
            row |= {"pass": bool(verdicts), "errors": errors, "limits": limits}
        if ours and row["pass"] and "errors" in row:
            row["in_a_row"] = in_a_row(way, whole)
            row["pass"] = row["in_a_row"] <= ROUNDING
        found.append(row)
        said = row.get("errors") or row["error"]
        verdict = "FAIL" if not row["pass"] else "PASS" if "errors" in row else "SKIP"
        say(f"{verdict} {text} {said}")
    return found


ROUNDING = 2e-2  # of the largest number: sums are added in any order, and rounded to 16 bits


def in_a_row(way: Way, whole: list[Tensor]) -> float:
    """The largest difference of what calls give, each with other numbers, right behind each other
    and each alone. Over the largest number on this rank, on the worst rank."""
    parts, _ = local(whole, way)

    def call(factor: float) -> list[Tensor]:
        some = [(t.detach() * factor).requires_grad_() for t in parts[:3]]
        out = way.attend(*some)
        return [out.detach(), *torch.autograd.grad(out, some, parts[3])]

    def settle() -> None:
        if parts[0].is_cuda:
            torch.cuda.synchronize()
        dist.barrier()

    factors = (1.0, -0.5, 0.7, 1.3)
    alone = []
    for factor in factors:
        settle()
        alone.append(call(factor))
    settle()
    together = [call(factor) for factor in factors]
    settle()
    worst = torch.zeros((), device=parts[0].device)
    for some, others in zip(alone, together, strict=True):
        for a, b in zip(some, others, strict=True):
            worst = torch.maximum(worst, (a - b).abs().max().float() / a.abs().max().float())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def graph(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Whether a CUDA graph of each call, agreed, gives the same as the call when it is replayed."""
    found = []
    for causal in (True, False):
        tokens = 1024 * dist.get_world_size()
        whole = tensors(tokens, 8, 2, 128, torch.bfloat16, device)
        for name, how in ALGORITHMS.items():
            if how.causal != causal:
                continue
            for copies in (False, True) if how.together else (False,):
                way = of_ringx(name, agreed=True, copies=copies)
                same = replayed(way, whole)
                found.append({"way": way.name, "tokens": tokens, "causal": causal, "pass": same})
                say(f"{'PASS' if same else 'FAIL'} graph {way.name} {tokens} {causal}")
    return found


def replayed(way: Way, whole: list[Tensor]) -> bool:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # what autograd keeps is of the stream that made it
        parts, _ = local(whole, way)

        def call() -> tuple[Tensor, ...]:
            out = way.attend(*parts[:3])
            return out.detach(), *torch.autograd.grad(out, parts[:3], parts[3])

        want = call()
        stream.synchronize()
        dist.barrier()
        torch.cuda.synchronize()  # also NCCL's streams, whose watchdog asks events of theirs
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
            found = call()
        for _ in range(2):
            for tensor in found:
                tensor.fill_(torch.nan)
            captured.replay()
        stream.synchronize()
    most = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, want, strict=True)]
    return all(error <= ROUNDING for error in most)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
