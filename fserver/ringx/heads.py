"""Ulysses: each rank attends to the whole sequence with a part of the heads (S. Jacobs and others,
*DeepSpeed Ulysses*, 2023). Two all-to-alls surround the kernel.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from . import kernels
from .kernels import Given, Pair, Triple
from .schedules import Job, full


def repeats(kv_heads: int, size: int) -> int:
    """How often Ulysses repeats each head of k and v: as seldom as all ranks can have as many."""
    return size // gcd(kv_heads, size)


def _exchange(job: Job, *tensors: Tensor, to_heads: bool) -> list[Tensor]:
    """Of this rank's rows ``[B, S, H, D]`` the whole sequence with its part of the heads; or the
    other way round."""
    size, found, under_way = job.ranks.size, [], []
    for t in tensors:
        if to_heads:
            sent = t.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4).contiguous()
        else:
            sent = t.transpose(0, 1).unflatten(0, (size, -1)).contiguous()
        found.append(torch.empty_like(sent))
        under_way.append(job.ranks.exchange(found[-1], sent))
    for work in under_way:
        work.wait()
    if to_heads:
        return [t.flatten(0, 1).transpose(0, 1) for t in found]
    return [t.permute(2, 1, 0, 3, 4).flatten(2, 3) for t in found]


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Exchanges rows for heads, and the answers back. lse travels too."""
    times = repeats(k.shape[2], job.ranks.size)
    k, v = (t.repeat_interleave(times, 2) if times > 1 else t for t in (k, v))
    q, k, v = _exchange(job, q, k, v, to_heads=True)
    out, lse = kernels.forward(q, k, v, job.blocks is not full, job.scale)
    out, level = _exchange(job, out, lse.transpose(1, 2)[..., None], to_heads=False)
    return out, level[..., 0].transpose(1, 2).contiguous()


def backward(job: Job, given: Given) -> Triple:
    """Exchanges all that backward is given, so that nothing but the local rows is kept until then,
    and the gradients back."""
    times = repeats(given.k.shape[2], job.ranks.size)
    dout, q, k, v, out, lse = given
    k, v = (t.repeat_interleave(times, 2) if times > 1 else t for t in (k, v))
    of_rows = dout, q, k, v, out, lse.transpose(1, 2)[..., None]
    dout, q, k, v, out, level = _exchange(job, *of_rows, to_heads=True)
    here = Given(dout, q, k, v, out, level[..., 0].transpose(1, 2))
    grads = kernels.backward(here, job.blocks is not full, job.scale)
    dq, dk, dv = _exchange(job, *grads, to_heads=False)
    if times > 1:
        dk, dv = (t.unflatten(2, (-1, times)).sum(3, dtype=job.reduce_dtype) for t in (dk, dv))
    return dq, dk, dv
