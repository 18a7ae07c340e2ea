"""When the ranks compare their arguments: in the first call, in each, or never."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ringx_timeouts import ALL, LIMIT, MEMBERS, REMEDY, group_of_three
from world import Rank, World

from fserver.errors import ConfigError, Error
from fserver.ringx import ringx_attention, unshard
from fserver.ringx.arguments import ALONE
from fserver.ringx.ranks import UNUSABLE, Ranks, ranks_of

X = torch.ones(1, 4, 2, 8)


def comparisons(me: Rank, calls: list[tuple[int, dict[str, Any]]]) -> list[int]:
    """How often each call compares, in a group that has made no call. Each has a length."""
    ask, asked = Ranks.ask, 0

    def counting(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(*args)

    found = []
    group = dist.new_group([*range(me.size)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "ask", counting)
        for length, options in calls:
            asked = 0
            x = torch.ones(1, length, 4, 8)
            ringx_attention(x, x, x, group=group, **{"causal": True, **options})
            found.append(asked)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return found


def test_later_calls_do_not_compare(world: World):
    calls: list[tuple[int, dict[str, Any]]] = [
        (4, {}), (4, {}), (8, {}), (4, {}), (8, {}),
        (4, {"agreed": False}), (4, {"agreed": False}), (4, {}), (16, {"agreed": True}), (16, {}),
        (4, {"scale": 0.5}), (4, {"algorithm": "X4"}), (4, {"causal": False}),
        (4, {"causal": False}), (4, {"algorithm": "ulysses"}), (4, {"algorithm": "ulysses"}),
    ]  # fmt: skip
    want = [1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0]
    assert world.run(ALL, comparisons, calls) == [want] * 4


def uneven(me: Rank) -> list[int]:
    """Lengths that differ once, and then change on one rank alone."""
    lengths = [[4, 4, 4, 4], [4, 6, 4, 4], [4, 6, 4, 4], [4, 5, 4, 4], [4, 4, 4, 4]]
    return comparisons(me, [(row[me.rank], {"causal": False, "agreed": None if at else False})
                            for at, row in enumerate(lengths[1:])])  # fmt: skip


def test_each_call_compares_behind_lengths_that_differ(world: World):
    assert world.run(ALL, uneven) == [[1, 1, 1, 1]] * 4


def attempt(group: dist.ProcessGroup, call: Callable[[], object]) -> tuple[str, str]:
    ranks = ranks_of(group)
    for backend in (group._get_backend(torch.device("cpu")), ranks.kept.control):
        backend._set_default_timeout(timedelta(seconds=LIMIT))
    with pytest.raises(Error) as error:
        call()
    return type(error.value).__name__, str(error.value)


def alone(me: Rank, changed: dict[str, Any]) -> list[tuple[str, str]] | None:
    """What a rank learns when rank 1 alone changes its arguments behind a first call, and then."""
    with group_of_three(me) as group:
        if me.rank not in MEMBERS:
            return None
        call: dict[str, Any] = {"q": X, "k": X, "v": X, "causal": True, "group": group}
        for _ in range(2):
            ringx_attention(**call)
        mine = {**call, **(changed if me.rank == 1 else {})}
        found = [attempt(group, lambda: ringx_attention(**mine))]
        if me.rank == 1:
            found.append(attempt(group, lambda: ringx_attention(**call)))
        return found


LONG, WIDE = torch.ones(1, 8, 2, 8), X.double()


@pytest.mark.parametrize(
    "changed",
    [
        dict.fromkeys("qkv", LONG),
        dict.fromkeys("qkv", WIDE),
        {"algorithm": "X4"},
        {"scale": 0.5},
        {"v": X.clone().requires_grad_()},
    ],
    ids=["length", "dtype", "algorithm", "scale", "gradient"],
)
def test_a_rank_that_changes_alone(world: World, changed: dict[str, Any]):
    """Nobody hangs, and nobody gets an answer. The rank hears both of what may have happened, and
    cannot join a later call of the others by chance."""
    first, one, nothing, third = world.run(ALL, alone, changed)
    assert nothing is None
    (kind, text), (_, later) = one
    assert kind == "TimeoutError" and text.startswith("ringx: comparing the arguments: "), text
    assert f"or has ended: see the output of the other ranks. {ALONE}" in text
    assert "pass agreed=False" in text and REMEDY.split(". ")[1] in text
    assert "a rank of the group has missed an earlier call" in later
    for ((kind, text),) in (first, third):
        assert kind in ("TimeoutError", "Error") and text.startswith("ringx: forward: "), text
        assert REMEDY in text


def test_a_rank_that_is_wrong_alone(world: World):
    """It hears its own error."""
    answers = world.run(ALL, alone, {"scale": -1.0})
    kind, text = answers[1][0]
    assert kind == "ConfigError" and text.startswith(
        "ringx: scale -1.0 of type float: want a positive"
    )
    assert answers[0][0][0] in ("TimeoutError", "Error")


def out_of_step(me: Rank) -> str:
    """Rank 1 has made a call that the others have not."""
    group = dist.new_group([*range(me.size)])
    ranks_of(group).kept.calls += me.rank == 1
    with pytest.raises(ConfigError) as error:
        ringx_attention(X, X, X, causal=True, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return str(error.value)


def test_a_rank_that_is_a_call_ahead(world: World):
    for text in world.run(ALL, out_of_step):
        assert text == (
            "ringx: the number of this call in the group is 1 on rank 0 and 2 on rank 1 of the "
            "group: want the same on all ranks"
        )


def questions(me: Rank) -> list[str]:
    """Rank 1 joins parts while the others compare, and then all ask again."""
    group = dist.new_group([*range(me.size)])
    said = []
    for _ in range(2):
        with pytest.raises(Error) as error:
            if me.rank == 1:
                unshard(X, "contiguous", group=group)
            else:
                ringx_attention(X, X, X, causal=True, group=group)
        said.append(str(error.value))
    dist.barrier(group)
    dist.destroy_process_group(group)
    return said


def test_two_questions_are_told_apart(world: World):
    for first, second in world.run(ALL, questions):
        want = "rank 0 of the group is at 'comparing the arguments' and rank 1 at 'joining the part"
        assert want in first and UNUSABLE in first
        assert "a rank of the group has missed an earlier call" in second
