"""Ring attention: keys and values go round, from each rank to the next (H. Liu, M. Zaharia and
P. Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import schedules
from .combine import Parts
from .kernels import Given, Pair, Triple, accumulator
from .ranks import Collective, Ranks
from .schedules import Job


def _round(ranks: Ranks, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Gives (owner, its keys) for all owners, the rank itself first, while the next keys travel."""
    for step in range(ranks.size):
        coming, work = kv, None
        if step + 1 < ranks.size:
            coming = torch.empty_like(kv)
            work = ranks.pass_on(coming, kv)
        yield (ranks.rank - step) % ranks.size, kv
        if work:
            work.wait()
        kv = coming


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Keys go round, and the rank works on those that it has."""
    answers = Parts(q.shape[1], accumulator(q.dtype), schedules.FASTEST)
    for owner, kv in _round(job.ranks, schedules._pack(k, v)):
        block = job.block(owner, q.shape[1], k.shape[1])
        assert block is not None
        schedules._head_start(q.device)
        schedules._attend(job, answers, q, *schedules._unpack(kv), block)
    return schedules._answer(job, answers)


def backward(job: Job, given: Given) -> Triple:
    """Keys go round, and behind them what has been added up of their gradients, which end at
    home."""
    ranks, kv = job.ranks, schedules._pack(given.k, given.v)
    dq = Parts(given.q.shape[1], accumulator(given.q.dtype), schedules.FASTEST)
    dkv = torch.zeros(kv.shape, dtype=job.reduce_dtype, device=kv.device)
    behind: Collective | None = None
    for owner, here in _round(ranks, kv):
        block = job.block(owner, given.q.shape[1], given.k.shape[1])
        assert block is not None
        schedules._head_start(kv.device)
        grads = schedules._more_grads(job, dq, given, here, block)
        if behind:
            behind.wait()
        for i, grad in enumerate(grads):
            dkv[block.keys, :, i] += grad.transpose(0, 1)
        if ranks.size > 1:
            sent, dkv = dkv, torch.empty_like(dkv)
            behind = ranks.pass_on(dkv, sent)
    if behind:
        behind.wait()
    return dq.result(given.q.dtype)[0], *schedules._unpack(dkv)
