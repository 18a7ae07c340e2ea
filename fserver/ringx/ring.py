"""Ring attention: keys and values go round, from each rank to the next (H. Liu, M. Zaharia and
P. Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import schedules
from .combine import Parts
from .kernels import Given, Triple, accumulator
from .ranks import Collective
from .schedules import Job


def arrivals(job: Job, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Gives (owner, its keys) for all owners, the rank itself first, while the next keys travel."""
    ranks, kv = job.ranks, schedules._pack(k, v)

    def start(kv: Tensor, step: int) -> tuple[Tensor, Collective | None]:
        if step + 1 == ranks.size:
            return kv, None
        coming = torch.empty_like(kv)
        return coming, ranks.pass_on(coming, kv)

    first = start(kv, 0)

    def turns() -> Iterator[tuple[int, Tensor]]:
        here, (coming, work) = kv, first
        for step in range(ranks.size):
            yield (ranks.rank - step) % ranks.size, here
            if work:
                work.wait()
                here = coming
                coming, work = start(here, step + 1)

    return turns()


def backward(job: Job, given: Given) -> Triple:
    """Keys go round, and behind them what has been added up of their gradients, which end at
    home."""
    ranks, k = job.ranks, given.k
    dq = Parts(given.q.shape[1], accumulator(given.q.dtype), schedules.FASTEST)
    shape = k.shape[1], k.shape[0], 2, *k.shape[2:]
    dkv = torch.zeros(shape, dtype=job.reduce_dtype, device=k.device)
    behind: Collective | None = None
    for owner, here in arrivals(job, k, given.v):
        block = job.block(owner, given.q.shape[1], k.shape[1])
        assert block is not None
        schedules._head_start(k.device)
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
