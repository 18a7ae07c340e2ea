"""GPU tests: skipped, with the reason, where there is none; failed with NEED_GPU=1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pair import Pair
from peers import Child, Process


def count() -> int:
    """GPUs of this host, counted without making this process a user of CUDA."""
    import subprocess
    import sys

    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cannot count the GPUs:\n{done.stderr}")
    return int(done.stdout)


GPUS: list[int] = []


@pytest.fixture(scope="session", autouse=True)
def gpus() -> int:
    if not GPUS:
        GPUS.append(count())
    if GPUS[0] == 0:
        if os.environ.get("NEED_GPU"):
            pytest.fail("NEED_GPU is set, and torch.cuda.is_available() is false")
        pytest.skip("no GPU: torch.cuda.is_available() is false")
    return GPUS[0]


@pytest.fixture(scope="session")
def processes(gpus: int) -> Iterator[None]:
    """Two processes that start at once; they and all others end with the session."""
    Process.ready(2)
    yield
    Process.end()


@pytest.fixture
def child(processes: None, request: pytest.FixtureRequest) -> Iterator[Callable[..., Child]]:
    """Has functions run in processes."""
    made: list[Child] = []

    def make(function: Callable[..., Any], *args: Any, **env: str) -> Child:
        made.append(Child(function, *args, **env))
        return made[-1]

    failed = request.session.testsfailed
    yield make
    for one in made:
        one.reap(wait=request.session.testsfailed == failed)


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


PLACES = [pytest.param((0, 0), id="one_gpu"), pytest.param((0, 1), id="two_gpus")]


def _placed(request: pytest.FixtureRequest, gpus: int) -> tuple[int, int]:
    if max(request.param) >= gpus:
        pytest.skip(f"needs two GPUs, this machine has {gpus}")
    return request.param


@pytest.fixture(scope="session")
def pairs(gpus: int) -> Iterator[Pairs]:
    kept = Pairs()
    yield kept
    kept.close()


@pytest.fixture(params=PLACES)
def pair(pairs: Pairs, gpus: int, request: pytest.FixtureRequest) -> Pair:
    """Two processes on one GPU, and on two."""
    return pairs.get(_placed(request, gpus))


@pytest.fixture(params=PLACES)
def fresh(gpus: int, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair of its own, for a test that kills."""
    own = Pair(_placed(request, gpus))
    yield own
    own.close()


@pytest.fixture
def made(gpus: int) -> Iterator[Callable[..., Pair]]:
    """Makes pairs of a test's own."""
    own: list[Pair] = []

    def make(devices: tuple[int | None, int | None], *env: dict[str, str]) -> Pair:
        own.append(Pair(devices, *env))
        return own[-1]

    yield make
    for one in own:
        one.close()
