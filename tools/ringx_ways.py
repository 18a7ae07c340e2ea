"""What ringx_bench.py compares: ringx, what others do, and a GPU alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from fserver.ringx import api, kernels, schedules
from fserver.ringx.algorithms import ALGORITHMS, Algorithm
from fserver.ringx.combine import Parts
from fserver.ringx.kernels import Given, Pair, Triple, accumulator
from fserver.ringx.ranks import Ranks
from fserver.ringx.schedules import Job

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
