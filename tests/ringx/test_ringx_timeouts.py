"""Ranks that do not come to a collective, or have left: the others get an error of fserver's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from exact import NAMES, ROWS, Problem, fitted
from world import Rank, World

import fserver
from fserver.ringx import ringx_attention, shard
from fserver.ringx.ranks import ranks_of

ALL, MEMBERS, ABSENT = (0, 1, 2, 3), [0, 1, 3], 1
LIMIT = 0.5
"""Seconds that the group's collectives have in the step in which a rank is absent."""

REMEDY = (
    "At least one rank has not made the same call, or has ended: see the output of the other "
    "ranks. The group is no longer usable: end its processes, or make a new group."
)


@contextmanager
def group_of_three(me: Rank) -> Iterator[dist.ProcessGroup]:
    """A group that may be broken. It is there until all ranks of the world are through."""
    group = dist.new_group(MEMBERS)
    try:
        if me.rank in MEMBERS:
            dist.barrier(group)  # connected
        yield group
    finally:
        dist.barrier(me.group)
        if me.rank in MEMBERS:
            dist.destroy_process_group(group)


def attempt(group: dist.ProcessGroup, step: Callable[[], object]) -> tuple[str, str]:
    """The type and the text of what a step raises that one rank does not take."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=LIMIT))
    began = time.monotonic()
    with pytest.raises(fserver.Error) as error:
        step()
    assert time.monotonic() - began < 30
    assert error.value.__cause__ is not None  # torch's
    return type(error.value).__name__, str(error.value)


def without_one(me: Rank, algorithm: str, step: str) -> tuple[str, str] | None:
    """What a rank learns when another one does not come to this step."""
    with group_of_three(me) as group:
        if me.rank not in MEMBERS:
            return None
        absent, rank = me.rank == ABSENT, MEMBERS.index(me.rank)
        name, causal, layout = ROWS[algorithm]
        problem = fitted(Problem(), algorithm, 3)
        q, k, v = (shard(t, layout, rank, 3).requires_grad_() for t in problem.tensors()[:3])

        def forward() -> torch.Tensor:
            options = {"algorithm": name, "causal": causal, "group": group, "layout": layout}
            return ringx_attention(q, k, v, agreed=step == "forward", **options)

        if step == "backward":
            out = forward()
            return None if absent else attempt(group, lambda: out.sum().backward())
        return None if absent else attempt(group, forward)


def check(answers: list[tuple[str, str] | None], step: str) -> None:
    assert answers[1] is answers[2] is None
    found = {0: answers[0], 2: answers[3]}
    assert any(kind == "TimeoutError" for kind, _ in found.values()), found
    for rank, (kind, text) in found.items():
        assert kind in ("TimeoutError", "Error")  # the others' time may be over a little earlier
        how = "timed out" if kind == "TimeoutError" else "failed"
        assert text.startswith(f"ringx: {step}: "), text
        assert f" {how} on rank {rank} of the group (global ranks [0, 1, 3])" in text
        assert REMEDY in text


def test_rank_that_does_not_call(world: World):
    answers = world.run(ALL, without_one, "X3", "comparing the arguments")
    check(answers, "comparing the arguments")
    assert "connecting for comparisons" in answers[0][1] and "longer timeout" in answers[0][1]


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", NAMES)
def test_rank_that_does_not_take_a_step(world: World, algorithm: str, step: str):
    """Also where nothing is compared."""
    check(world.run(ALL, without_one, algorithm, step), step)


def test_owner_is_named(world: World):
    """X1 exchanges for one owner after the other."""
    answers = world.run(ALL, without_one, "X1", "forward")
    assert any("from rank " in answer[1] for answer in answers if answer), answers


def left(me: Rank) -> tuple[str, str] | None:
    """A rank leaves the group behind its first call, as one does that ends."""
    group = dist.new_group(MEMBERS)
    if me.rank not in MEMBERS:
        return None
    x = torch.ones(1, 4, 2, 8)
    ringx_attention(x, x, x, causal=True, group=group)
    if me.rank == ABSENT:
        ranks_of(group).kept.control = None  # closes its connections
        dist.destroy_process_group(group)
        return None
    with pytest.raises(fserver.Error) as error:
        ringx_attention(x, x, x, causal=True, group=group, agreed=False)
    dist.destroy_process_group(group)
    return type(error.value).__name__, str(error.value)


def test_rank_that_has_left(world: World):
    """Nobody waits for the group's time, which is half an hour."""
    answers = world.run(ALL, left)
    for rank, answer in ((0, answers[0]), (2, answers[3])):
        assert answer is not None
        kind, text = answer
        assert kind == "Error", text
        assert text.startswith(
            f"ringx: comparing the arguments: the comparison failed on rank {rank}"
        )
        assert REMEDY in text and "onnection" in text


def out_of_memory(me: Rank) -> str:
    """No other rank's doing."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    x = torch.ones(1, 4, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_into_tensor", full)
        with pytest.raises(torch.OutOfMemoryError) as error:
            ringx_attention(x, x, x, causal=True, group=me.group, algorithm="X3")
    return str(error.value)


def test_other_errors_stay_what_they_are(world: World):
    assert world.run((0,), out_of_memory) == ["full"]
