"""What is on a GPU's timeline while tensors travel, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Crew = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def profiled(gpus: int) -> Iterator[Crew]:
    """Has a worker and a server, a GPU each, make round trips of one kind; gives what each saw."""
    if gpus < 2:
        pytest.skip(f"needs two GPUs, this machine has {gpus}")
    from fserver.bench import graph

    crews: list[graph.Crew] = []

    def run(kind: str) -> list[dict[str, Any]]:
        if not crews:
            crews.append(graph.Crew((1, 1), dry=False))
        options = {"kind": kind, "shape": (0, 0, 128, 7168), "trips": 20}
        try:
            return crews[0].run(graph.zero_sm, 40, options)
        except BaseException:
            crews.pop().close()
            raise

    yield run
    for crew in crews:
        crew.close()


@pytest.mark.parametrize(
    ("kind", "path"),
    [("eager", "cudaipc"), ("copy", "copy"), ("copy graph", "copy"), ("kernel", "kernel")],
)
def test_kernels(profiled: Crew, kind: str, path: str) -> None:
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
