"""Which positions of a sequence a rank holds.

``contiguous``: rank r has the r-th part; the first parts are one longer where the length does not
divide. ``zigzag``: the sequence is cut into 2N chunks and rank r has chunks r and 2N-1-r, so that
under a causal mask all ranks have as much to do. `ringx_attention` wants contiguous parts for a
full mask and for X2, and zigzag parts for X3 and X4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fserver.errors import ConfigError, ShapeError

LAYOUTS = ("contiguous", "zigzag")


def positions(
    length: int, layout: str, rank: int, size: int, device: torch.device | str | None = None
) -> Tensor:
    """The positions in a sequence of `length` that `rank` of `size` has, in its order: int64.

    This is what a rotary embedding of the rank's rows takes.

    Raises:
        ConfigError: there is no such layout or rank.
        ShapeError: zigzag, and the length is not a multiple of 2 * size.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"ringx: layout {layout!r}: want one of {LAYOUTS}")
    if not 0 <= rank < size:
        raise ConfigError(f"ringx: rank {rank} of {size}")
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
    """The part of `x` that `rank` of `size` has, along `dim`: a copy.

    Raises:
        ConfigError, ShapeError: as for positions.
    """
    return x.index_select(dim, positions(x.shape[dim], layout, rank, size, x.device))


def unshard(parts: Sequence[Tensor], layout: str, dim: int = 1) -> Tensor:
    """The whole of which `parts`, one for each rank in order, are the shards: a copy.

    Raises:
        ConfigError, ShapeError: as for positions.
    """
    whole = torch.cat(tuple(parts), dim)
    size, length = len(parts), whole.shape[dim]
    places = [positions(length, layout, rank, size, whole.device) for rank in range(size)]
    return whole.index_select(dim, torch.cat(places).argsort())
