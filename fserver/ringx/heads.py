"""Ulysses: each rank attends to the whole sequence with a part of the heads (S. Jacobs and others,
*DeepSpeed Ulysses*, 2023). Two all-to-alls surround the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from . import kernels
from .kernels import Given, Pair, Triple
from .ranks import Ranks
from .schedules import Job, full


def repeats(kv_heads: int, size: int) -> int:
    """How often Ulysses repeats each head of k and v: as seldom as all ranks can have as many."""
    return size // gcd(kv_heads, size)


def _exchange(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Row r of each goes to rank r, and what has come from it takes its place."""
    found, under_way = [], []
    for tensor in tensors:
        sent = tensor.contiguous()
        found.append(torch.empty_like(sent))
        under_way.append((sent, ranks.exchange(found[-1], sent)))
    for _, work in under_way:
        work.wait()
    return found


def _to_heads(job: Job, *tensors: Tensor) -> list[Tensor]:
    """Of ``[B, S, H, D]`` the whole sequence, with this rank's part of the heads."""
    parts = [t.unflatten(2, (job.ranks.size, -1)).permute(2, 1, 0, 3, 4) for t in tensors]
    return [t.flatten(0, 1).transpose(0, 1) for t in _exchange(job.ranks, parts)]


def _to_rows(job: Job, *tensors: Tensor) -> list[Tensor]:
    """Of the whole sequence this rank's rows, with all heads."""
    parts = [t.transpose(0, 1).unflatten(0, (job.ranks.size, -1)) for t in tensors]
    return [t.permute(2, 1, 0, 3, 4).flatten(2, 3) for t in _exchange(job.ranks, parts)]


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Exchanges rows for heads, and the answers back. lse travels too."""
    times = repeats(k.shape[2], job.ranks.size)
    k, v = (t.repeat_interleave(times, 2) if times > 1 else t for t in (k, v))
    q, k, v = _to_heads(job, q, k, v)
    out, lse = kernels.forward(q, k, v, job.blocks is not full, job.scale)
    out, level = _to_rows(job, out, lse.transpose(1, 2)[..., None])
    return out, level[..., 0].transpose(1, 2).contiguous()


def backward(job: Job, given: Given) -> Triple:
    """Exchanges all that backward is given, so that nothing but the local rows is kept until then,
    and the gradients back."""
    times = repeats(given.k.shape[2], job.ranks.size)
    dout, q, k, v, out, lse = given
    k, v = (t.repeat_interleave(times, 2) if times > 1 else t for t in (k, v))
    of_rows = dout, q, k, v, out, lse.transpose(1, 2)[..., None]
    dout, q, k, v, out, level = _to_heads(job, *of_rows)
    here = Given(dout, q, k, v, out, level[..., 0].transpose(1, 2))
    dq, dk, dv = _to_rows(job, *kernels.backward(here, job.blocks is not full, job.scale))
    if times > 1:
        dk, dv = (t.unflatten(2, (-1, times)).sum(3, dtype=job.reduce_dtype) for t in (dk, dv))
    return dq, dk, dv
