"""Random dtypes, shapes (0 to 10 dimensions, also without rows), sizes and counts between several
workers and servers, with up to three requests of each worker under way. Both ends compare keys,
dtypes, shapes and all bytes, in memory that held other values before. There are few keys, so that
the tensors of a key grow, shrink and change dtype.

RANDOM_STEPS=N makes N steps, and RANDOM_SEED=N others; what differs names its seed and step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import randoms
import torch
from bench_fakes import corrupting_node

from fserver.bench import crew
from fserver.bench.crew import Crew, Member, Place, real_node
from fserver.bench.errors import WrongDataError

STEPS = int(os.environ.get("RANDOM_STEPS", "40"))
SEED = int(os.environ.get("RANDOM_SEED", "7"))
LIMIT = 1 << 18  # bytes of a tensor
CHUNK = 100  # steps that are over within crew.TIMEOUT


def played(
    transport: str,
    workers: int = 2,
    servers: int = 2,
    server: Callable[[Place], Any] = real_node,
    steps: int = STEPS,
) -> Counter[str]:
    """What was moved and compared."""
    members = [
        Member("workers", randoms.RandomWorkers, "worker", nodes=workers),
        Member("servers", randoms.RandomServers, "server", nodes=servers),
    ]
    moved: Counter[str] = Counter()
    with (
        mock.patch.dict(crew.MAKE, {"server": server}),
        Crew(members) as both,
        both.cluster(transport),
    ):
        for first in range(0, steps, CHUNK):
            count = min(CHUNK, steps - first)
            moved.update(both.all("play", SEED, first, count, LIMIT)[0])
        assert transport in (both.transport(), "auto")
    return moved


@pytest.mark.parametrize(
    ("transport", "workers", "servers"), [("tcp", 2, 2), ("cma", 2, 2), ("auto", 3, 1)]
)
def test_every_byte_arrives(transport: str, workers: int, servers: int) -> None:
    moved = played(transport, workers, servers)
    assert moved["requests"] >= STEPS * workers and moved["tensors"] and moved["bytes"]


def test_one_wrong_byte_is_seen() -> None:
    text = rf"the workers received wrong data: seed {SEED}, step \d+, .*: answer \d+ of server \d+"
    with pytest.raises(WrongDataError, match=text):
        played("tcp", server=corrupting_node, steps=12)


def test_plans_follow_from_the_seed() -> None:
    dtypes = randoms.usable_dtypes()
    assert {torch.uint8, torch.float32, torch.bfloat16, torch.bool, torch.complex64} <= set(dtypes)

    def plans(seed: int) -> list[list[list[randoms.Request]]]:
        return [randoms.plan(seed, step, 2, 3, 1 << 16, dtypes) for step in range(50)]

    assert plans(1) == plans(1) != plans(2)
    tensors = [
        t
        for step in plans(1)
        for requests in step
        for request in requests
        for t in [*request.push, *(t for answers in request.pull for t in answers)]
    ]
    assert {len(t.shape) for t in tensors} == set(range(randoms.MAX_DIMS + 1))
    assert {t.dtype for t in tensors} == set(dtypes)
    assert any(0 in t.shape for t in tensors)
    assert max(t.make().nbytes for t in tensors) <= 1 << 16
    few = tensors[0]
    few.check(few.make(), "itself")
    with pytest.raises(WrongDataError, match="a copy"):
        few.check(few.make().reshape(-1, 1, 1), "a copy")
