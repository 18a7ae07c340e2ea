"""GPU tests skip where there is no GPU, and say so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent.parent))

import torch  # noqa: E402
from pair import Pair  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
PLACES = [
    pytest.param((0, 0), id="one_gpu"),
    pytest.param(
        (0, 1),
        id="two_gpus",
        marks=pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, this machine has {GPUS}"),
    ),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if GPUS:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, this machine has none"))


class Pairs:
    """Keeps the two processes of a placement from one test to the next: they take seconds to
    start. A pair that has failed is not used again."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], Pair] = {}

    def get(self, devices: tuple[int, int]) -> Pair:
        pair = self._pairs.get(devices)
        if pair is None or not pair.alive:
            if pair is not None:
                pair.close()
            pair = self._pairs[devices] = Pair(devices)
        return pair

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()


@pytest.fixture(scope="session")
def pairs() -> Iterator[Pairs]:
    kept = Pairs()
    yield kept
    kept.close()


@pytest.fixture(params=PLACES)
def pair(pairs: Pairs, request: pytest.FixtureRequest) -> Pair:
    return pairs.get(request.param)


@pytest.fixture(params=PLACES)
def fresh(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair of its own, for a test that kills."""
    own = Pair(request.param)
    yield own
    own.close()
