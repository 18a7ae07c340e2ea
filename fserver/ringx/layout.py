"""Which positions of a sequence a rank holds.

``contiguous``: rank r has the r-th part; the first parts are one longer where the length does not
divide. ``zigzag``: the sequence is cut into 2N chunks and rank r has chunks r and 2N-1-r, so that
under a causal mask all ranks have as much to do. `layout_of` says which of them an algorithm of
`ringx_attention` wants: zigzag for X3, X3c, X4 and X4o, contiguous for the others.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from fserver.errors import ConfigError, ShapeError

LAYOUTS = ("contiguous", "zigzag")


def positions(
    length: int, layout: str, rank: int, size: int, device: torch.device | str | None = None
) -> Tensor:
    """Returns the positions of a sequence that a rank holds, in its order, as int64.

    A rotary embedding of the rank's rows takes them.

    Args:
        length: number of tokens of the whole sequence.
        layout: ``"contiguous"`` or ``"zigzag"``.
        rank: the rank, 0 to size - 1.
        size: number of ranks.
        device: where the result is; None: the CPU.

    Raises:
        ConfigError: there is no such layout, rank, size or length.
        ShapeError: the layout is zigzag, and the length is no multiple of 2 * size.
    """
    check_layout(layout)
    length, size = _whole("length", length, 0), _whole("size", size, 1)
    if not 0 <= _whole("rank", rank, 0) < size:
        raise ConfigError(f"ringx: rank {rank} of {size}: want 0 to {size - 1}")
    if layout == "contiguous":
        short, longer = divmod(length, size)
        start = rank * short + min(rank, longer)
        return torch.arange(start, start + short + (rank < longer), device=device)
    if length % (2 * size):
        raise ShapeError(
            f"ringx: zigzag over {size} ranks: length {length} is no multiple of {2 * size} "
            "(pad the sequence)"
        )
    chunks = torch.arange(length, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def shard(x: Tensor, layout: str, rank: int, size: int, dim: int = 1) -> Tensor:
    """Returns a copy of the part of a tensor that a rank holds.

    Args:
        x: the whole tensor.
        layout: ``"contiguous"`` or ``"zigzag"``.
        rank: the rank, 0 to size - 1.
        size: number of ranks.
        dim: the dimension of the tokens.

    Raises:
        ConfigError: there is no such layout, rank or size, or x is no tensor with that dimension.
        ShapeError: the layout is zigzag, and the length is no multiple of 2 * size.
    """
    _has_dim("x", x, dim)
    return x.index_select(dim, positions(x.shape[dim], layout, rank, size, x.device))


def unshard(parts: Sequence[Tensor], layout: str, dim: int = 1) -> Tensor:
    """Returns a copy of the whole tensor, of which the given parts are the shards.

    Args:
        parts: the parts, one for each rank, in order.
        layout: ``"contiguous"`` or ``"zigzag"``.
        dim: the dimension of the tokens.

    Raises:
        ConfigError: there is no such layout, or a part is no tensor with that dimension.
        ShapeError: the parts are not the shards of one tensor.
    """
    parts = tuple(parts)
    if not parts:
        raise ConfigError("ringx: parts (): want one for each rank")
    for rank, part in enumerate(parts):
        _has_dim(f"parts[{rank}]", part, dim)
    size, length = len(parts), sum(part.shape[dim] for part in parts)
    places = [positions(length, layout, rank, size, parts[0].device) for rank in range(size)]
    for rank, (part, place) in enumerate(zip(parts, places, strict=True)):
        want = list(parts[0].shape)
        want[dim] = len(place)
        if list(part.shape) != want:
            raise ShapeError(
                f"ringx: parts[{rank}].shape {tuple(part.shape)}: want {tuple(want)}, as rank "
                f"{rank} of {size} has of a {layout} sequence of {length}"
            )
    return torch.cat(parts, dim).index_select(dim, torch.cat(places).argsort())


def check_layout(layout: str) -> None:
    """Raises a ConfigError if there is no such layout."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ConfigError(f"ringx: layout {reprlib.repr(layout)}: want one of {LAYOUTS}")


def _whole(name: str, value: int, least: int) -> int:
    try:
        found = index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise ConfigError(f"ringx: {name} {value!r}: want a whole number, {least} or more")
    return found


def _has_dim(name: str, value: Tensor, dim: int) -> None:
    if not isinstance(value, Tensor):
        raise ConfigError(f"ringx: {name} is of type {type(value).__name__}: want a torch.Tensor")
    if not -value.dim() <= _whole("dim", dim, -value.dim()) < value.dim():
        raise ConfigError(
            f"ringx: dim {dim}: {name}.shape is {tuple(value.shape)} (want a smaller)"
        )
