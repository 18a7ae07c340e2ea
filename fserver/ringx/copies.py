"""X3, X3b and X4 without a collective, where ranks reach each other's memory: keys and values are
copied from their owners, and their gradients to them. docs/ringx.md says how, under *By copies*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels, schedules
from .combine import Parts
from .kernels import Given, Pair, Triple, accumulator
from .schedules import FASTEST, Block, Job
from .window import Mark, Window


class Visit(NamedTuple):
    """A call of a kernel: of my rows, with these keys of each of some owners."""

    rows: slice
    keys: slice
    owners: list[int]


@lru_cache
def _places(rank: int, size: int, together: int) -> dict[int, tuple[int, int]]:
    """Of each other rank as an owner: the round in which it has its turn here, with so many others,
    and its number in that. The first is the rank before, so that no two ranks have the same owner
    at a time."""
    owners = ((rank - 1 - turn) % size for turn in range(size - 1))
    return {owner: divmod(turn, together) for turn, owner in enumerate(owners)}


def _visits(job: Job, rows: int, keys: int, together: int) -> list[list[Visit]]:
    """What this rank calls in each round."""
    ranks = job.ranks
    rounds: list[list[Visit]] = []
    for owner, (number, _) in _places(ranks.rank, ranks.size, together).items():
        if number == len(rounds):
            rounds.append([])
        block = job.block(owner, rows, keys)
        assert block is not None
        last = rounds[-1][-1] if rounds[-1] else None
        if last and (last.rows, last.keys) == (block.rows, block.keys):
            last.owners.append(owner)
        else:
            rounds[-1].append(Visit(block.rows, block.keys, [owner]))
    return rounds


def _in_window(k: Tensor) -> tuple[int, ...]:
    """The shape of keys and values, or of their gradients, in a window: what a rank copies is one
    piece of each."""
    return 2, k.shape[1], k.shape[0], *k.shape[2:]


def fits(job: Job, k: Tensor, together: int, backward: bool) -> bool:
    """Whether the window has the memory for a forward or backward of such keys: for those of this
    rank, and for the gradients from the ranks of one round, or of two that alternate."""
    window = job.window
    if window is None or job.reduce_dtype is not accumulator(k.dtype):
        return False
    size = 2 * k.numel() * k.element_size()
    slots = together if together == job.ranks.size - 1 else 2 * together
    if not window.reserve(job.ranks, "keys", size):
        return False
    return not backward or window.reserve(job.ranks, "grads", slots * size)


Rounds = Iterator[list[tuple[Visit, Tensor]]]


def _copy_keys(job: Job, window: Window, k: Tensor, v: Tensor, rounds: list[list[Visit]]) -> Rounds:
    """Gives the visits of each round with their keys and values ``[2, S, B, Hkv, D]``. The first
    round's copies start at once, those of the next when a round is given."""
    shape = _in_window(k)
    mine = window.of(job.ranks.rank, "keys", shape, k.dtype)
    for part, tensor in zip(mine, (k, v), strict=True):
        part.copy_(tensor.transpose(0, 1))

    def start(number: int) -> tuple[list[tuple[Visit, Tensor]], Mark]:
        found = []
        for visit in rounds[number]:
            length = visit.keys.stop - visit.keys.start
            every = (2, len(visit.owners) * length, *shape[2:])
            found.append((visit, torch.empty(every, dtype=k.dtype, device=k.device)))
        with window.beside():
            if number == 0:
                window.fence()  # all have written theirs
            for visit, kv in found:
                for owner, place in zip(visit.owners, kv.chunk(len(visit.owners), 1), strict=True):
                    theirs = window.of(owner, "keys", shape, k.dtype)
                    for to, of in zip(place, theirs, strict=True):
                        to.copy_(of[visit.keys])
            came = window.mark()
            if number + 1 == len(rounds):
                window.fence()  # all have what they wanted
        return found, came

    coming = deque([start(0)])

    def given() -> Rounds:
        for number in range(len(rounds)):
            if number + 1 < len(rounds):
                coming.append(start(number + 1))
            found, came = coming.popleft()
            came.wait()
            yield found
            del found

    return given()


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, together: int) -> Pair:
    """Works on the own block while keys travel, then on those of so many owners at a time, while
    the next ones' travel."""
    assert job.window is not None
    rounds = _visits(job, q.shape[1], k.shape[1], together)
    arrivals = _copy_keys(job, job.window, k, v, rounds)
    answers = Parts(q.shape[1], accumulator(q.dtype), FASTEST)
    schedules._head_start(q.device)
    schedules._own_forward(job, answers, q, k, v)
    for visits in arrivals:
        for visit, kv in visits:
            some = (q[:, visit.rows], kv[0].transpose(0, 1), kv[1].transpose(0, 1))
            answers.add(visit.rows, *kernels.forward(*some, False, job.scale))
            del some
        del visits, kv
    return schedules._answer(job, answers)


def backward(job: Job, given: Given, *, together: int) -> Triple:
    """What a call gives to dk and dv is copied to the owners as it is, and each adds up what has
    come for it. Half of the own block comes first, while keys travel, and half last, while the
    last gradients do."""
    assert job.window is not None
    window, ranks, k = job.window, job.ranks, given.k
    rows, keys, shape = given.q.shape[1], k.shape[1], _in_window(k)
    rounds = _visits(job, rows, keys, together)
    arrivals = _copy_keys(job, window, k, given.v, rounds)
    dq = Parts(rows, accumulator(given.q.dtype), FASTEST)
    schedules._head_start(k.device)
    own_dk, own_dv, rest = schedules._own_backward(job, dq, given)
    mine = [Parts(keys, accumulator(k.dtype), together + 2) for _ in range(2)]
    for parts, own in zip(mine, (own_dk, own_dv), strict=True):
        parts.add(slice(0, keys), own)

    def slot(rank: int, owner: int) -> Tensor:
        """The owner's room for what this rank gives to it."""
        number, turn = _places(rank, ranks.size, together)[owner]
        start = (number % 2 * together + turn) * 2 * k.numel()
        return window.of(owner, "grads", shape, k.dtype, start)

    def take(number: int) -> None:
        """Adds what has come in a round."""
        for rank in range(ranks.size):
            block = None if rank == ranks.rank else job.blocks(rank, ranks.rank, rows, keys)
            if block and _places(rank, ranks.size, together)[ranks.rank][0] == number:
                for parts, came in zip(mine, slot(rank, ranks.rank), strict=True):
                    parts.add(block.keys, came[block.keys].transpose(0, 1))

    before: tuple[Mark, list[Tensor]] | None = None

    def work(number: int, visits: list[tuple[Visit, Tensor]]) -> tuple[Mark, list[Tensor]]:
        """Gives the fence behind a round's copies, and what is not to be freed before that."""
        sent: list[Tensor] = []
        for left, (visit, kv) in zip(reversed(range(len(visits))), visits, strict=True):
            here = given._replace(k=kv[0].transpose(0, 1), v=kv[1].transpose(0, 1))
            dkv = schedules._grads(job, dq, here, Block(visit.rows, slice(None), False))
            sent += (t.to(k.dtype).transpose(0, 1).contiguous() for t in dkv)
            if not left and before:
                before[0].wait()
                take(number - 1)
                for parts in mine:
                    parts.settle()  # the next round comes to the same place
            with window.beside():
                pieces = zip(*(t.chunk(len(visit.owners)) for t in sent[-2:]), strict=True)
                for owner, grads in zip(visit.owners, pieces, strict=True):
                    for to, grad in zip(slot(ranks.rank, owner), grads, strict=True):
                        to[visit.keys].copy_(grad)
                if not left:
                    window.fence()
                    fence = window.mark()
        return fence, sent

    for number, visits in enumerate(arrivals):
        before = work(number, visits)
        del visits
    if rest:
        schedules._head_start(k.device)
        for parts, own in zip(mine, schedules._grads(job, dq, given, rest), strict=True):
            parts.add(rest.keys, own)
    assert before
    before[0].wait()
    take(len(rounds) - 1)
    dk, dv = (parts.result(k.dtype)[0] for parts in mine)
    return dq.result(given.q.dtype)[0], dk, dv
