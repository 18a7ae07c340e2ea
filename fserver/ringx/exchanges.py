"""What the ranks exchange by collectives: keys and values from one owner after the other (X4, and
backward of X1 and X2), all at once (X3, also of packed documents), or from each rank to the next
(ring); the keys that a sliding window needs; or queries (forward of X1 and X2). copies.py and
heads.py have more ways.

Sources: H. Liu, M. Zaharia and P. Abbeel, *Ring Attention with Blockwise Transformers for
Near-Infinite Context*, 2023. I. Beltagy, M. Peters and A. Cohan, *Longformer*, 2020 (sliding window
attention). The exchange of halos is that of stencil computations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from . import kernels
from .kernels import Pair, Segments, on_device, ranges, stream_of
from .ranks import Collective
from .schedules import Block, Job, Work, add, finish, head_start, pack, put, unpack, zero_between

KEYS_AHEAD = 2
"""So many broadcasts are under way: one that did not get its place before a block still has the
time of the next block."""


def in_turn(
    job: Job, send: Callable[[int], tuple[Tensor, Collective]], ahead: int
) -> Iterator[tuple[int, Tensor]]:
    """Gives (owner, its tensor) for all owners. The first broadcast starts at once; so many more
    are under way while the caller works on one."""
    size = job.ranks.size
    coming = deque(send(owner) for owner in range(min(max(ahead, 1), size)))

    def turns() -> Iterator[tuple[int, Tensor]]:
        for owner in range(size):
            tensor, work = coming.popleft() if coming else send(owner)
            work.wait()
            if ahead and owner + ahead < size:
                coming.append(send(owner + ahead))
            yield owner, tensor
            del tensor, work

    return turns()


def broadcasts(
    job: Job, k: Tensor, v: Tensor, work: Work, backward: bool, *, ahead: bool = True,
    behind: bool = False,
) -> Pair | None:  # fmt: skip
    """Keys come from one owner after the other, with `ahead` while the rank works on others. dk and
    dv of each owner are added up there, with `behind` while the next owner's are computed.

    In forward the own block is first. In backward it has its turn among the others: a rank with
    nothing to do in its turn would wait for the sum.
    """
    ranks, mine, sums = job.ranks, pack(k, v), deque[Collective]()
    home = mine  # in backward dk and dv of the own keys take its place

    def send(owner: int) -> tuple[Tensor, Collective]:
        kv = mine
        if owner != ranks.rank:
            kv = mine.new_empty((job.k_lengths[owner], *mine.shape[1:]))
        return kv, ranks.broadcast(kv, owner)

    def add_up(owner: int, written: list[slice], *got: Tensor) -> None:
        """Sends what the owner's keys got."""
        nonlocal home
        dkv = mine.new_empty((job.k_lengths[owner], *mine.shape[1:]), dtype=job.reduce_dtype)
        for keys in written:
            put(dkv, keys, *got)
        zero_between(dkv, written)
        home = dkv if owner == ranks.rank else home
        sums.append(ranks.sum_at(owner, dkv))
        while len(sums) > behind:
            sums.popleft().wait()

    turns = in_turn(job, send, KEYS_AHEAD if ahead else 0)
    first, half = job.own(backward and behind, k.device)
    if not backward:
        head_start(k.device)
        work(first, k, v)
    for owner, kv in turns:
        own, got = owner == ranks.rank, None
        block = first if own else job.block(ranks.rank, owner)
        if block and (backward or not own):
            head_start(k.device)
            got = work(block, *((k, v) if own else unpack(kv[block.keys])))
        if backward:
            add_up(owner, [block.keys] if block else [], *(got or ()))
        del kv, got
    return finish(work, half, k, v, sums, home) if backward else None


def gather(job: Job, k: Tensor, v: Tensor, work: Work, backward: bool) -> Pair | None:
    """All keys are gathered while the rank works on its own block. dk and dv of all keys are
    written into one buffer, whose sum over the ranks is scattered. For packed documents an index
    picks the keys of a call, and puts their gradients back."""
    ranks, mine, packed = job.ranks, pack(k, v), job.ends is not None
    kv = mine.new_empty((ranks.size * len(mine), *mine.shape[1:]))
    here = ranks.gather(kv, mine)
    del mine
    grads, written = kv, list[slice]()
    if backward:
        make = torch.zeros_like if packed else torch.empty_like
        grads = make(kv, dtype=job.reduce_dtype)

    def give(keys: list[slice] | Tensor, dk: Tensor, dv: Tensor) -> None:
        if isinstance(keys, Tensor):
            grads.index_copy_(0, keys, pack(dk, dv).to(grads.dtype))
            return
        lengths = [some.stop - some.start for some in keys]
        for some, *got in zip(keys, dk.split(lengths, 1), dv.split(lengths, 1), strict=True):
            put(grads, some, *got)
        written.extend(keys)

    own, *calls = documents_planned(job, k.device) if packed else planned(job)
    first, half = (own, None) if packed else job.own(backward, k.device)
    head_start(k.device)
    got = work(first, k, v)
    if backward:
        give(own.keys, *got)
    del got
    here.wait()
    for block in calls:
        got = work(block, *unpack(_picked(kv, block.keys)))
        if backward:
            give(block.keys, *got)
        del got
    if not backward:
        return None
    if not packed:
        zero_between(grads, written)
    home = grads.new_empty((k.shape[1], *grads.shape[1:]))
    return finish(work, half, k, v, [ranks.scatter_sum(home, grads)], home)


def _picked(kv: Tensor, keys: list[slice] | Tensor) -> Tensor:
    """Returns the keys of a call as one sequence."""
    if isinstance(keys, Tensor):
        return kv[keys]
    picked = [kv[some] for some in keys]
    return picked[0] if len(picked) == 1 else torch.cat(picked)


def planned(job: Job) -> list[Block]:
    """The calls where all keys are gathered: the own block, one call for what the same rows see of
    all owners before, and one of all behind. So there are three, however many ranks there are."""
    rank, size = job.ranks.rank, job.ranks.size
    length, calls = job.k_lengths[rank], list[Block]()
    for owners in range(rank, rank + 1), range(rank), range(rank + 1, size):
        block = job.block(rank, owners[0]) if owners else None
        if block is None:
            continue
        keys = [slice(owners.start * length, owners.stop * length)]
        if block.keys != slice(0, length):
            at = (owner * length for owner in owners)
            keys = [slice(start + block.keys.start, start + block.keys.stop) for start in at]
        calls.append(block._replace(keys=keys))
    return calls


def documents_planned(job: Job, device: torch.device) -> list[Block]:
    """As planned, for packed documents under the causal mask. A rank has two chunks of each
    document (zigzag), so all ranks have the same rows and the same work, however long documents
    are. Each call is for all documents. An index picks its keys, document after document."""
    assert job.ends is not None
    return _documents_planned(job.ends, job.ranks.rank, job.ranks.size, device, stream_of(device))


@lru_cache(maxsize=16)
def _documents_planned(
    ends: tuple[int, ...], rank: int, size: int, device: torch.device, stream: int
) -> list[Block]:
    """Kept for the layers of a model: on each stream, behind what has made it there."""
    local, halves = (tuple(end // parts for end in ends) for parts in (size, 2 * size))
    starts = on_device([*local], device)
    chunks = starts.diff() // 2
    first, second = (
        ranges(begin, chunks, halves[-1]) for begin in (starts[:-1], starts[:-1] + chunks)
    )
    by_owner = torch.arange(ends[-1], device=device).view(size, -1)
    every = slice(0, local[-1])
    own = slice(rank * local[-1], (rank + 1) * local[-1])
    calls = [Block(every, [own], Segments(local, local, True))]
    if rank:
        before = tuple(rank * end for end in halves)
        calls.append(
            Block(every, by_owner[:rank, first].T.flatten(), Segments(local, before, False))
        )
    if rank < size - 1:
        behind = tuple((size - 1 - rank) * end for end in local)
        keys = by_owner[rank + 1 :].T.flatten()
        calls.append(Block(second, keys, Segments(halves, behind, False)))
    return calls


def ring(job: Job, k: Tensor, v: Tensor, work: Work, backward: bool) -> Pair | None:
    """Keys go round, the next ones while the rank works, and behind them the sums of their
    gradients, which end at home."""
    ranks, kv, sums = job.ranks, pack(k, v), deque[Collective]()
    dkv = kv
    for step in range(ranks.size):
        more = step + 1 < ranks.size
        if more:
            coming = torch.empty_like(kv)
            came = ranks.pass_on(coming, kv)
        if backward and step == 0:
            dkv = torch.zeros_like(kv, dtype=job.reduce_dtype)
        block = job.block(ranks.rank, (ranks.rank - step) % ranks.size)
        assert block is not None
        head_start(k.device)
        got = work(block, *unpack(kv[block.keys]))
        if backward:
            if sums:
                sums.popleft().wait()
            add(dkv, block.keys, *got)
            del got
        if backward and ranks.size > 1:
            after = torch.empty_like(dkv)
            sums.append(ranks.pass_on(after, dkv))
            dkv = after
        if more:
            came.wait()
            kv = coming
    return finish(work, None, k, v, sums, dkv) if backward else None


def halo(job: Job, k: Tensor, v: Tensor, work: Work, backward: bool) -> Pair | None:
    """A sliding window: a row sees its own key and the `window` - 1 before it, of its own document.
    An all-to-all brings the keys before the own ones that rows see, the *halo*, from the ranks that
    have them. So what travels, and the work of a rank, depend on the window and not on the length
    of the sequence. There is one block. In backward another all-to-all takes the gradients of the
    halo back to the owners of its keys, who add them to theirs."""
    ranks, mine = job.ranks, pack(k, v)
    of_each, to_each, seen = halo_planned(job)
    came = mine.new_empty((sum(of_each), *mine.shape[1:]))
    sent = torch.cat([mine[len(mine) - count :] for count in to_each])
    ranks.exchange(came, sent, of_each, to_each).wait()
    kv = torch.cat((came, mine))
    del mine, came, sent
    got = work(Block(slice(0, job.q_lengths[ranks.rank]), None, seen), *unpack(kv))
    if not backward:
        return None
    grads = pack(*got).to(job.reduce_dtype)
    lent, home = grads.tensor_split([sum(of_each)])
    back = lent.new_empty((sum(to_each), *lent.shape[1:]))
    ranks.exchange(back, lent, to_each, of_each).wait()
    for part in back.split(to_each):
        home[len(home) - len(part) :] += part
    return unpack(home)


def halo_planned(job: Job) -> tuple[list[int], list[int], Segments]:
    """Returns how many keys of each rank are the halo here, how many of the own keys are that of
    each rank, and the documents of the rows and of the keys with the halo."""
    rank, size, window = job.ranks.rank, job.ranks.size, job.span
    assert window is not None
    stops = [*accumulate(job.k_lengths)]
    starts = [0, *stops[:-1]]
    ends = job.ends or (0, stops[-1])
    firsts = [max(row - window + 1, ends[bisect_right(ends, row) - 1]) for row in starts]

    def lent(owner: int, taker: int) -> int:
        """The owner's last keys, if the taker's first row sees them."""
        first = max(starts[owner], firsts[taker])
        return max(0, stops[owner] - first) if owner < taker else 0

    start, stop = starts[rank], stops[rank]
    cuts = (*ends[bisect_right(ends, start) : bisect_right(ends, stop - 1)], stop)
    rows, keys = ((0, *(cut - first for cut in cuts)) for first in (start, firsts[rank]))
    return (
        [lent(owner, rank) for owner in range(size)],
        [lent(rank, taker) for taker in range(size)],
        Segments(rows, keys, True, window),
    )


# Queries travel: the forward of X1 and X2, whose backward is by broadcasts


def queries_forward(job: Job, q: Tensor, k: Tensor, v: Tensor, *, overlap: bool) -> Pair:
    """All ranks answer the queries of each owner in turn, and the answers are added up there.

    With `overlap`, while one owner's are answered the next one's are on their way here, the
    maximum for the last one is being found and the sum for the one before it.
    """
    ranks, dim = job.ranks, q.shape[-1]
    lag = 1 if overlap else 0
    answered: deque[tuple[int, Tensor, Tensor, Tensor, Collective]] = deque()
    summed: deque[tuple[int, Tensor, Tensor, Collective]] = deque()
    result: list[Tensor] = []

    def send(owner: int) -> tuple[Tensor, Collective]:
        if owner == ranks.rank:
            rows = q.transpose(0, 1).contiguous()
        else:
            rows = q.new_empty((job.q_lengths[owner], q.shape[0], *q.shape[2:]))
        return rows, ranks.broadcast(rows, owner)

    def weigh() -> None:
        """Numerators and denominators of one owner's rows, in one buffer, to the owner."""
        owner, out, lse, peak, found = answered.popleft()
        found.wait()
        weight = (lse - peak).exp_().permute(2, 0, 1)[..., None]
        flat = torch.empty(weight.numel() * (dim + 1), dtype=job.reduce_dtype, device=q.device)
        above, below = _parts(flat, weight.shape, dim)
        torch.mul(out.transpose(0, 1), weight, out=above)
        below.copy_(weight)
        summed.append((owner, flat, peak, ranks.sum_at(owner, flat)))

    def settle() -> None:
        owner, flat, peak, done = summed.popleft()
        done.wait()
        if owner == ranks.rank:
            shape = (q.shape[1], q.shape[0], q.shape[2], 1)
            above, below = (t.to(peak.dtype) for t in _parts(flat, shape, dim))
            lse = peak + below[..., 0].log().permute(1, 2, 0)
            result.extend(((above / below).transpose(0, 1), lse))

    for owner, rows in in_turn(job, send, lag):
        block = job.block(owner, ranks.rank) or Block(slice(0, len(rows)), slice(0, 0))
        some = rows.transpose(0, 1), k[:, block.keys], v[:, block.keys]
        out, lse = kernels.forward(*some, block.mask is True, job.scale)
        peak = lse.clone(memory_format=torch.contiguous_format)
        answered.append((owner, out, lse, peak, ranks.maximum(peak)))
        if len(answered) > lag:
            weigh()
        if len(summed) > lag:
            settle()
    while answered:
        weigh()
    while summed:
        settle()
    return result[0], result[1]


def _parts(flat: Tensor, shape: Sequence[int], dim: int) -> Pair:
    """Numerators [S, B, H, D] and denominators [S, B, H, 1] in their common buffer."""
    count = flat.numel() // (dim + 1) * dim
    return flat[:count].view(*shape[:-1], dim), flat[count:].view(shape)
