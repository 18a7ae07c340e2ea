"""`fserver bench graph` on the CPU, without graphs: the program, not the speed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fserver.bench import graph
from fserver.bench.graph import overlap, trips
from fserver.bench.team import Team, Teammate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import on_graphs  # noqa: E402


class Moment:
    """In place of an event."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Moment) -> float:
        return (later.at - self.at) * 1e3

    def synchronize(self) -> None: ...

    def wait(self) -> None: ...

    def query(self) -> bool:
        return True


def alike(at: list[float], traffic: list[list[Any]]) -> list[dict[str, Any]]:
    """Of GEMMs that nothing ran beside."""
    return [{"slowed": 0.01, "noise": 0.0, "blocks": [1, 1, 1]} for _ in traffic]


class DrySide(Teammate):
    """On the CPU."""

    def run(self, function: Callable[..., Any], what: dict[str, Any]) -> Any:
        os.environ["NVCC"] = "no-such-nvcc"
        overlap.compared = alike
        if "how" in what:  # few round trips
            what["how"] = what["how"].partition("x")[0] + "x3"
        return super().run(function, what)

    def channel(self, key: int, mode: Any, *tensors: Sequence[torch.Tensor]) -> Any:
        return super().channel(key, "host", *tensors)

    def together(self) -> None:
        self.barrier()

    def mark(self) -> Moment:
        return Moment()

    def captured(self, body: Callable[[], object], stream: Any) -> Callable[[], object]:
        return body


class DryCheckedSide(DrySide, on_graphs.CheckedSide):
    """What tests/gpu have the sides do, which runs on the CPU too."""


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with messages of 1 MiB at most, and no compiler of CUDA."""
    monkeypatch.setattr(graph, "team", lambda shape, variables: Team(shape, actor=DrySide))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(trips, "BIG", 1 << 20)
