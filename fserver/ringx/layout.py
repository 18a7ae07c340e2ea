"""Which positions of a sequence a rank holds.

``contiguous``: rank r has part r of the sequence. If the length cannot be divided evenly, the first
parts are longer by one. ``zigzag``: the sequence is cut into 2N chunks, and rank r has chunks r and
2N-1-r, so that all ranks have the same amount of work under a causal mask. `layout_of` returns the
layout that an algorithm of `ringx_attention` needs.

Packed documents, given by `cu_seqlens`: under zigzag each document is cut into 2N chunks by itself,
so that a rank has two chunks of each, document after document. Under contiguous the documents make
no difference to the rows. In both, positions start again at 0 in each document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fserver.errors import ConfigError, Error, ShapeError

from .arguments import CuSeqlens, check_chunks, check_dim, check_layout, ends_of, whole
from .kernels import ranges
from .ranks import Group, Ranks, ranks_of


def positions(
    length: int,
    layout: str,
    rank: int | None = None,
    size: int | None = None,
    device: torch.device | str | None = None,
    *,
    group: Group | None = None,
    cu_seqlens: CuSeqlens | None = None,
) -> Tensor:
    """Returns the positions that a rank holds, as an int64 tensor in the order of its rows.

    Use them for position embeddings of the local rows, such as rotary embeddings.

    Args:
        length: number of tokens of the whole sequence.
        layout: ``"contiguous"`` or ``"zigzag"``.
        rank: the rank, 0 to size - 1. None, as size: that of this process in the group.
        size: number of ranks.
        device: device of the result. None: the CPU.
        group: as in `ringx_attention`, if rank and size are left out.
        cu_seqlens: as in `ringx_attention`. Positions then start at 0 in each document.

    Raises:
        ConfigError: the layout, rank, size, length or type of cu_seqlens is not valid.
        ShapeError: the layout is zigzag, and the length, or that of a document, is not a multiple
            of 2 * size; or cu_seqlens does not end at length.
    """
    device = "cpu" if device is None else device  # whatever the default device is
    rows = _rows(length, layout, rank, size, device, group, cu_seqlens)
    if cu_seqlens is None:
        return rows
    starts = torch.tensor(ends_of(cu_seqlens), device=device)
    return rows - starts[torch.bucketize(rows, starts[1:], right=True)]


def _rows(
    length: int, layout: str, rank: int | None, size: int | None,
    device: torch.device | str | None, group: Group | None, cu_seqlens: CuSeqlens | None,
) -> Tensor:  # fmt: skip
    """Returns which rows of the whole sequence a rank holds."""
    check_layout(layout)
    rank, size = _place(rank, size, group)
    length, size = whole("length", length, 0), whole("size", size, 1)
    if not 0 <= whole("rank", rank, 0) < size:
        raise ConfigError(f"ringx: rank {rank} with size {size}: want 0 to {size - 1}")
    ends = (0, length) if cu_seqlens is None else ends_of(cu_seqlens)
    if ends[-1] != length:
        raise ShapeError(f"ringx: cu_seqlens ends at {ends[-1]}: want the length, {length}")
    if layout == "contiguous":
        short, longer = divmod(length, size)
        start = rank * short + min(rank, longer)
        return torch.arange(start, start + short + (rank < longer), device=device)
    check_chunks(ends, size)
    begins = torch.tensor(ends, device=device)
    chunks = begins.diff() // (2 * size)
    pairs = torch.stack((begins[:-1] + rank * chunks, begins[1:] - (rank + 1) * chunks), 1)
    return ranges(pairs.flatten(), chunks.repeat_interleave(2), length // size)


def shard(
    x: Tensor,
    layout: str,
    rank: int | None = None,
    size: int | None = None,
    dim: int = 1,
    *,
    group: Group | None = None,
    cu_seqlens: CuSeqlens | None = None,
) -> Tensor:
    """Returns the part of a tensor that a rank holds, as a copy.

    Args:
        x: the whole tensor.
        layout: ``"contiguous"`` or ``"zigzag"``.
        dim: the dimension of the tokens.
        rank, size, group, cu_seqlens: as in `positions`.

    Raises:
        ConfigError: the layout, rank, size or type of cu_seqlens is not valid, or x is not a tensor
            with this dimension.
        ShapeError: as in `positions`.
    """
    check_dim("x", x, dim)
    return x.index_select(dim, _rows(x.shape[dim], layout, rank, size, x.device, group, cu_seqlens))


def unshard(
    parts: Sequence[Tensor] | Tensor, layout: str, dim: int = 1, *, group: Group | None = None,
    cu_seqlens: CuSeqlens | None = None,
) -> Tensor:  # fmt: skip
    """Joins the parts of all ranks. Returns the whole tensor, as a copy without a gradient.

    Args:
        parts: the parts, one for each rank, in the order of the ranks. Or the part of this rank:
            then all ranks of the group have to make the call, with tensors of one dtype, on one
            type of device.
        layout: ``"contiguous"`` or ``"zigzag"``.
        dim: the dimension of the tokens.
        group: as in `ringx_attention`, if parts is one tensor.
        cu_seqlens: as in `positions`.

    Raises:
        ConfigError: the layout or type of cu_seqlens is not valid, or a part is not a tensor with
            this dimension.
        ShapeError: the parts are not the shards of one tensor.
    """
    if isinstance(parts, Tensor):
        parts = _gathered(parts, dim, ranks_of(group))
    parts = tuple(parts)
    if not parts:
        raise ConfigError("ringx: parts (): want one tensor for each rank")
    for rank, part in enumerate(parts):
        check_dim(f"parts[{rank}]", part, dim)
    size, length = len(parts), sum(part.shape[dim] for part in parts)
    where = parts[0].device, None, cu_seqlens
    places = [_rows(length, layout, rank, size, *where) for rank in range(size)]
    for rank, (part, place) in enumerate(zip(parts, places, strict=True)):
        want = list(parts[0].shape)
        want[dim] = len(place)
        if list(part.shape) != want:
            raise ShapeError(
                f"ringx: parts[{rank}].shape {tuple(part.shape)}: want {tuple(want)} (the {layout} "
                f"part of rank {rank} of {size} of a sequence of {length})"
            )
    return torch.cat([part.detach() for part in parts], dim).index_select(
        dim, torch.cat(places).argsort()
    )


def _place(rank: int | None, size: int | None, group: Group | None) -> tuple[int, int]:
    """Returns rank and size; those of this process in the group, if both are None."""
    if rank is not None and size is not None and group is None:
        return rank, size
    if rank is not None or size is not None:
        raise ConfigError(
            f"ringx: rank {rank!r}, size {size!r}, group {group!r}: want rank and size, or a group "
            "without them"
        )
    ranks = ranks_of(group)
    return ranks.rank, ranks.size


def _gathered(part: Tensor, dim: int, ranks: Ranks) -> list[Tensor]:
    """Returns the parts of all ranks, whose lengths may differ. What else differs, or is wrong on
    a rank, is an error on all, before the parts travel."""
    ranks.step = "joining the parts"
    problem: Error | None = None
    length, kind = 0, ()
    try:
        check_dim("parts", part, dim)
        length = part.shape[dim]
        kind = (
            part.dtype,
            part.device.type,
            dim % part.dim(),
            *part.shape[:dim],
            *part.shape[dim:][1:],
        )
    except ConfigError as error:
        problem = error
    lengths, kinds = zip(*ranks.ask((length, kind)), strict=True)
    if problem:
        raise problem
    other = next((rank for rank in range(ranks.size) if kinds[rank] != kind), None)
    if other is not None:
        raise ShapeError(
            f"ringx: parts of rank {other} of the group differs from that of rank {ranks.rank}, "
            f"{part.dtype} {tuple(part.shape)} on {part.device.type} with dim {dim}, in more than "
            "the length: want one dtype, shape and type of device"
        )
    rows = part.detach().movedim(dim, 0)
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[:length] = rows
    everybody = padded.new_empty((ranks.size, *padded.shape))
    ranks.gather(everybody.flatten(0, 1), padded).wait()
    return [every[:count].movedim(0, dim) for every, count in zip(everybody, lengths, strict=True)]
