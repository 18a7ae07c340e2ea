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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fserver.errors import ConfigError
from fserver.ringx import api, kernels, positions, schedules, window
from fserver.ringx.algorithms import ALGORITHMS, Algorithm
from fserver.ringx.combine import Parts
from fserver.ringx.kernels import Given, Pair, Triple, accumulator
from fserver.ringx.ranks import Ranks
from fserver.ringx.schedules import Job
from fserver.ringx.window import Window, known

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Way:
    """One way to compute attention over ranks: from and to local [B, S, H, D]."""

    name: str
    layout: str
    attend: Attend
    around: Callable[[], Any] = nullcontext  # what has to be open while it runs
    whole: bool = False  # takes the whole sequence on each rank


# What others do


class Local(torch.autograd.Function):
    """The kernel alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse = kernels.forward(q, k, v, causal, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        scale = dout.shape[-1] ** -0.5
        grads = kernels.backward(Given(dout, *ctx.saved_tensors), ctx.causal, scale)
        return *(t.to(dout.dtype) for t in grads), None


class Exchange(torch.autograd.Function):
    """All-to-all: parts of the sequence with all heads become the sequence with parts of the
    heads, or (`back`) the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, back: bool) -> Tensor:
        ctx.size, ctx.back = size, back
        return _exchange(x, size, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.size, not ctx.back), None, None


def _exchange(x: Tensor, size: int, back: bool) -> Tensor:
    batch, length, heads, dim = x.shape
    if back:
        parts = x.unflatten(1, (size, length // size)).permute(1, 0, 2, 3, 4).contiguous()
    else:
        parts = x.unflatten(2, (size, heads // size)).permute(2, 0, 1, 3, 4).contiguous()
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts)
    if back:
        return got.permute(1, 2, 0, 3, 4).reshape(batch, length // size, heads * size, dim)
    return got.permute(1, 0, 2, 3, 4).reshape(batch, length * size, heads // size, dim)


def ulysses(size: int, causal: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (Exchange.apply(t, size, False) for t in (q, k, v))
        return Exchange.apply(Local.apply(q, k, v, causal), size, True)

    return attend


def _pass_on(ranks: Ranks, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Sends to the next rank, receives from the one before."""
    got = torch.empty_like(tensor)
    after = dist.get_global_rank(ranks.group, (ranks.rank + 1) % ranks.size)
    before = dist.get_global_rank(ranks.group, (ranks.rank - 1) % ranks.size)
    send = dist.P2POp(dist.isend, tensor, after, ranks.group)
    receive = dist.P2POp(dist.irecv, got, before, ranks.group)
    return got, dist.batch_isend_irecv([send, receive])


def ring_forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, blocks: schedules.Blocks) -> Pair:
    """Ring attention: keys go round while the rank works on those it has."""
    ranks, kv = job.ranks, schedules._pack(k, v)
    answers = Parts(q.shape[1], accumulator(q.dtype), schedules.FASTEST)
    for step in range(ranks.size):
        if step + 1 < ranks.size:
            coming, works = _pass_on(ranks, kv)
        if step == 0:
            schedules._own_forward(job, answers, q, k, v, blocks)
        else:
            owner = (ranks.rank - step) % ranks.size
            block = blocks(ranks.rank, owner, q.shape[1], k.shape[1])
            schedules._attend(job, answers, q, *schedules._unpack(kv), block)
        if step + 1 < ranks.size:
            for work in works:
                work.wait()
            kv = coming
    return schedules._answer(job, answers)


def ring_backward(job: Job, given: Given, *, blocks: schedules.Blocks) -> Triple:
    """Keys go round, and behind them their gradients, which end at home."""
    ranks, kv = job.ranks, schedules._pack(given.k, given.v)
    dq = Parts(given.q.shape[1], accumulator(given.q.dtype), schedules.FASTEST)
    block = blocks(ranks.rank, ranks.rank, given.q.shape[1], given.k.shape[1])
    assert block is not None
    dkv = torch.zeros(kv.shape, dtype=job.reduce_dtype, device=kv.device)
    schedules._put(dkv, block.keys, *schedules._grads(job, dq, given, block))
    if ranks.size == 1:
        return dq.result(given.q.dtype)[0], *schedules._unpack(dkv)
    kv, works = _pass_on(ranks, kv)
    dkv, grads = _pass_on(ranks, dkv)
    for step in range(1, ranks.size):
        for work in works:
            work.wait()
        works = []
        here = kv
        if step + 1 < ranks.size:
            kv, works = _pass_on(ranks, here)
        owner = (ranks.rank - step) % ranks.size
        block = blocks(ranks.rank, owner, given.q.shape[1], given.k.shape[1])
        dk, dv = schedules._more_grads(job, dq, given, here, block)
        for work in grads:
            work.wait()
        dkv[block.keys, :, 0] += dk.transpose(0, 1)
        dkv[block.keys, :, 1] += dv.transpose(0, 1)
        dkv, grads = _pass_on(ranks, dkv)
    for work in grads:
        work.wait()
    return dq.result(given.q.dtype)[0], *schedules._unpack(dkv)


def ring(causal: bool) -> Way:
    how = Algorithm(schedules.zigzag if causal else schedules.full, ring_forward, ring_backward)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = Ranks(dist.group.WORLD)
        lengths = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
        job = Job(ranks, q.shape[-1] ** -0.5, *lengths, accumulator(q.dtype), q.dtype)
        return api._Attention.apply(q, k, v, None, how, job)[0]

    return Way("ring p2p", how.layout, attend)


def of_torch(rotation: str, causal: bool, tokens: int, device: torch.device) -> Way:
    """torch's context_parallel. Its sharding is done here: a buffer of positions is all it gets."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    @contextmanager
    def around() -> Iterator[None]:
        set_rotate_method(rotation)
        before, _cp_options.enable_load_balance = _cp_options.enable_load_balance, causal
        where = torch.arange(tokens, device=device)
        try:
            with context_parallel(mesh, buffers=[where], buffer_seq_dims=[0]):
                yield
        finally:
            _cp_options.enable_load_balance = before

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    layout = "zigzag" if causal else "contiguous"
    return Way(f"torch {rotation}", layout, attend, around)


def of_ringx(name: str, **options: bool) -> Way:
    """With options, whose names are a part of the way's."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = ALGORITHMS[name].causal
        return api.ringx_attention(q, k, v, algorithm=name, causal=causal, **options)

    said = [name, *(option for option, wanted in options.items() if wanted)]
    return Way(" ".join(said), ALGORITHMS[name].layout, attend)


def ways(causal: bool, tokens: int, size: int, device: torch.device) -> list[Way]:
    """Everything that is compared, the GPU alone first."""

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Local.apply(q, k, v, causal)

    found = [Way("alone", "contiguous", alone, whole=True)]
    ours = [name for name, how in ALGORITHMS.items() if how.causal == causal]
    for name in ours:
        found.append(of_ringx(name))
        if ALGORITHMS[name].together:
            found.append(of_ringx(name, copies=True))
        found.append(of_ringx(name, agreed=True))
    found.append(ring(causal))
    found.append(Way("ulysses", "contiguous", ulysses(size, causal)))
    for rotation in ("allgather", "alltoall"):
        found.append(of_torch(rotation, causal, tokens, device))
    return found


# Tensors, and what is right


def tensors(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """q, k, v and the gradient of out, of the whole sequence, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(tokens)
    return [
        torch.randn(1, tokens, n, dim, device=device, dtype=torch.float32, generator=generator).to(
            dtype
        )
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def exact(whole: list[Tensor], causal: bool, rows: Tensor) -> dict[str, Tensor]:
    """out and dq of some rows in float64, from all keys. [1, rows, H, D]"""
    q, k, v, dout = whole
    group = q.shape[2] // k.shape[2]
    found: dict[str, list[Tensor]] = {"out": [], "dq": []}
    for head in range(q.shape[2]):
        some, grad = q[0, rows, head].double(), dout[0, rows, head].double()
        keys, values = (t[0, :, head // group].double() for t in (k, v))
        scores = some @ keys.T * q.shape[-1] ** -0.5
        if causal:
            unseen = torch.arange(keys.shape[0], device=q.device)[None] > rows[:, None]
            scores = scores.masked_fill_(unseen, -torch.inf)
        p = scores.softmax(-1)
        out = p @ values
        found["out"].append(out)
        ds = p * (grad @ values.T - (grad * out).sum(-1, keepdim=True))
        found["dq"].append(ds @ keys * q.shape[-1] ** -0.5)
    return {name: torch.stack(parts, 1)[None] for name, parts in found.items()}


def exact_all(whole: list[Tensor], causal: bool) -> dict[str, Tensor]:
    """out and all gradients in float64, a head at a time."""
    q, k, v, dout = (t.double() for t in whole)
    out, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    for head in range(q.shape[2]):
        near = head // group
        one = [t[:, :, n].unsqueeze(1) for t, n in ((q, head), (k, near), (v, near))]
        result, lse = kernels.REFERENCE.forward(*one, causal, scale)
        given = Given(dout[:, :, head].unsqueeze(1), *one, result, lse)
        grads = kernels.REFERENCE.backward(given, causal, scale)
        out[:, :, head], dq[:, :, head] = result[:, 0], grads[0][:, 0]
        dk[:, :, near] += grads[1][:, 0]
        dv[:, :, near] += grads[2][:, 0]
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def off(found: Tensor, want: Tensor) -> Tensor:
    """Squared error and squared size, to be added up over ranks."""
    return torch.stack(((found.detach().double() - want).square().sum(), want.square().sum()))


def relative(sums: Tensor) -> float:
    """Root mean square error over root mean square."""
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def local(whole: list[Tensor], way: Way) -> tuple[list[Tensor], Tensor]:
    """This rank's part of all, and where it is."""
    rank, size = (0, 1) if way.whole else (dist.get_rank(), dist.get_world_size())
    where = positions(whole[0].shape[1], way.layout, rank, size, whole[0].device)
    parts = whole if way.whole else [t[:, where] for t in whole]
    return [t.detach().requires_grad_() for t in parts[:3]] + [parts[3]], where


# check


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


# graph


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


# time


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


# Results


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


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


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
