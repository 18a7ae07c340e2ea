"""ringx against dense attention in float64."""

import pytest
import torch
from exact import CAUSAL, FULL, NAMES, Problem, assembled, attend, dense, errors, poisoned
from world import GROUPS, World

from fserver.ringx.api import ALGORITHMS

EXACT = 1e-12


def check(world, members, problem, algorithm, *args, function=attend, limit=EXACT):
    found = assembled(
        world.run(members, function, problem, algorithm, *args), problem, algorithm, *args[:1]
    )
    worst = errors(found, dense(problem, ALGORITHMS[algorithm].causal))
    assert max(worst.values()) <= limit, worst


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", GROUPS, ids=str)
def test_is_exact(world: World, members: tuple[int, ...], algorithm: str) -> None:
    check(world, members, Problem(batch=2), algorithm)
    check(world, members, Problem(batch=2), algorithm, function=poisoned)
