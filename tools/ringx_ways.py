"""The ways that ringx_bench.py compares: ringx, others' ways, and a GPU alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention import SDPBackend

from fserver.ringx import api, schedules
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


@dataclass
class Way:
    """One way to compute attention over all ranks, from and to local [B, S, H, D]."""

    name: str
    layout: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    around: Callable[[], Any] = nullcontext  # a context that has to be open meanwhile
    whole: bool = False  # each rank takes the whole sequence


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention, [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def ulysses(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """All-to-all: each rank attends to the whole sequence with a part of the heads."""
    size = dist.get_world_size()

    def exchange(x: Tensor, cut: int, join: int) -> Tensor:
        parts = torch.stack(x.chunk(size, cut))
        got = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
        return torch.cat(got.unbind(), join)

    return exchange(alone(*(exchange(t, 2, 1) for t in (q, k, v)), causal), 1, 2)


def _pass_on(ranks: Ranks, tensor: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Sends to the next rank and receives from the one before."""
    got = torch.empty_like(tensor)
    after, before = ((ranks.rank + step) % ranks.size for step in (1, -1))
    send = dist.P2POp(dist.isend, tensor, group=ranks.group, group_peer=after)
    receive = dist.P2POp(dist.irecv, got, group=ranks.group, group_peer=before)
    return got, dist.batch_isend_irecv([send, receive])


def _round(ranks: Ranks, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Gives (owner, its keys) for all owners, while the next keys travel."""
    for step in range(ranks.size):
        coming, works = _pass_on(ranks, kv) if step + 1 < ranks.size else (kv, [])
        yield (ranks.rank - step) % ranks.size, kv
        for work in works:
            work.wait()
        kv = coming


def ring_forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, blocks: schedules.Blocks) -> Pair:
    """Ring attention: keys go round while the rank works on those that it has."""
    answers = Parts(q.shape[1], accumulator(q.dtype), schedules.FASTEST)
    for owner, kv in _round(job.ranks, schedules._pack(k, v)):
        if owner == job.ranks.rank:
            schedules._own_forward(job, answers, q, k, v, blocks)
        else:
            block = blocks(job.ranks.rank, owner, q.shape[1], k.shape[1])
            schedules._attend(job, answers, q, *schedules._unpack(kv), block)
    return schedules._answer(job, answers)


def ring_backward(job: Job, given: Given, *, blocks: schedules.Blocks) -> Triple:
    """Keys go round, and behind them their gradients, which end at home."""
    ranks, kv = job.ranks, schedules._pack(given.k, given.v)
    dq = Parts(given.q.shape[1], accumulator(given.q.dtype), schedules.FASTEST)
    dkv = torch.zeros(kv.shape, dtype=job.reduce_dtype, device=kv.device)
    works: list[dist.Work] = []
    for owner, here in _round(ranks, kv):
        block = blocks(ranks.rank, owner, given.q.shape[1], given.k.shape[1])
        assert block is not None
        if owner == ranks.rank:
            dk, dv = schedules._grads(job, dq, given, block)
        else:
            dk, dv = schedules._more_grads(job, dq, given, here, block)
        for work in works:
            work.wait()
        dkv[block.keys, :, 0] += dk.transpose(0, 1)
        dkv[block.keys, :, 1] += dv.transpose(0, 1)
        if ranks.size > 1:
            dkv, works = _pass_on(ranks, dkv)
    for work in works:
        work.wait()
    return dq.result(given.q.dtype)[0], *schedules._unpack(dkv)


def ring(q: Tensor, k: Tensor, v: Tensor, how: Algorithm) -> Tensor:
    ranks = Ranks(dist.group.WORLD)
    lengths = [q.shape[1]] * ranks.size, [k.shape[1]] * ranks.size
    job = Job(ranks, q.shape[-1] ** -0.5, *lengths, accumulator(q.dtype), q.dtype)
    return api._Attention.apply(q, k, v, None, how, job)[0]


@contextmanager
def context_parallel(rotation: str, causal: bool, where: Tensor) -> Iterator[None]:
    """torch's own. A buffer of positions is all that it gets to shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel

    mesh, settings = init_device_mesh(where.device.type, (dist.get_world_size(),)), _attention
    settings.set_rotate_method(rotation)
    before = settings._cp_options.enable_load_balance
    settings._cp_options.enable_load_balance = causal
    try:
        with context_parallel(mesh, buffers=[where], buffer_seq_dims=[0]):
            yield
    finally:
        settings._cp_options.enable_load_balance = before


def of_ringx(causal: bool) -> Iterator[Way]:
    """Each algorithm with each option, whose name is a part of the way's."""
    for name, how in ALGORITHMS.items():
        for option in ("", "copies", "agreed") if how.causal == causal else ():
            if option != "copies" or how.together:
                options = {
                    "algorithm": name,
                    "causal": causal,
                    **({option: True} if option else {}),
                }
                attend = partial(api.ringx_attention, **options)
                yield Way(f"{name} {option}".strip(), how.layout, attend)


def ways(causal: bool, tokens: int, device: torch.device) -> Iterator[Way]:
    """All that is compared, the GPU alone first."""
    local, layout = partial(alone, causal=causal), "zigzag" if causal else "contiguous"
    yield Way("alone", "contiguous", local, whole=True)
    yield from of_ringx(causal)
    how = Algorithm(schedules.zigzag if causal else schedules.full, ring_forward, ring_backward)
    yield Way("ring p2p", layout, partial(ring, how=how))
    yield Way("ulysses", "contiguous", partial(ulysses, causal=causal))
    for rotation in ("allgather", "alltoall"):
        where = torch.arange(tokens, device=device)
        around = partial(context_parallel, rotation, causal, where)
        yield Way(f"torch {rotation}", layout, local, around)
