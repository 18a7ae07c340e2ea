"""What one block of keys gave to some rows, before `combine` makes it one with the others."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Part(NamedTuple):
    """What some rows got: out or dq ``[B, n, H, D]``, and lse ``[B, H, n]`` of an out."""

    rows: slice  # of n, among all
    value: Tensor
    lse: Tensor | None
