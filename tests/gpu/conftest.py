"""GPU tests: skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from peers import Child


def count() -> int:
    """GPUs of this host, counted without making this process a user of CUDA."""
    import subprocess
    import sys

    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout or 0)


GPUS: list[int] = []


@pytest.fixture(scope="session", autouse=True)
def gpus() -> int:
    if not GPUS:
        GPUS.append(count())
    if GPUS[0] == 0:
        pytest.skip("no GPU: torch.cuda.is_available() is false")
    return GPUS[0]


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts processes, and ends those that are left at the end of the test."""
    made: list[Child] = []

    def make(function: Callable[..., Any], *args: Any, **env: str) -> Child:
        made.append(Child(function, *args, **env))
        return made[-1]

    yield make
    for one in made:
        one.reap()
