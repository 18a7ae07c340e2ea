"""What is on a GPU's timeline while tensors travel, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from on_graphs import CheckedSide, zero_sm

from fserver.bench import graph
from fserver.bench.team import Team

Profiled = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def profiled(gpus: int) -> Iterator[Profiled]:
    """Has a worker and a server, a GPU each, make round trips of one kind; gives what each saw."""
    if gpus < 2:
        pytest.skip(f"needs two GPUs, this machine has {gpus}")
    teams: list[Team] = []

    def run(kind: str) -> list[dict[str, Any]]:
        if not teams:
            teams.append(graph.team((1, 1), actor=CheckedSide))
            teams[0].__enter__()
        what = {"kind": kind, "shape": (0, 0, 128, 7168), "trips": 20}
        try:
            device = "gpu" if kind == "eager" else "cpu"
            return graph.play(teams[0], zero_sm, what, 40, device=device)
        except BaseException:
            teams.pop().close(0)
            raise

    yield run
    for team in teams:
        team.close()


@pytest.mark.parametrize(
    ("kind", "path"),
    [("eager", "cudaipc"), ("copy", "copy"), ("copy graph", "copy"), ("kernel", "kernel")],
)
def test_kernels(profiled: Profiled, kind: str, path: str) -> None:
    """push_pull and mode "copy" use no SM. Mode "kernel" does, which shows that kernels
    of a channel are seen, as those of torch are."""
    for seen in profiled(kind):
        assert seen["control"], "the profiler does not see a kernel of torch"
        assert seen["transport"] == path
        assert seen["wrong"] == 0
        if kind == "kernel":
            assert sum(seen["kernel"].values()) >= 2 * 20
        else:
            assert seen["kernel"] == {}
            assert sum(seen["gpu_memcpy"].values()) == 20
        assert seen["gpu_memset"] == {}
