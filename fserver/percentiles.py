"""Percentiles, as all tables of fserver and of its tests have them."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest sample that at least `percent` of the sorted ones do not exceed: nearest
    rank."""
    return ordered[-(-len(ordered) * percent // 100) - 1]
