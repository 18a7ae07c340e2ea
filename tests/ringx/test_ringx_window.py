"""Ranks that copy from and to each other's memory, against dense attention in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact import ROWS, Problem, assembled, attend, check, dense, errors
from files import in_window, in_window_poisoned, windowed
from test_ringx_schedules import GLOBAL, LOCAL, attend_mutated, counted, made_wrong
from torch.distributed import _symmetric_memory
from world import GROUPS, Rank, World

import fserver
from fserver.ringx import positions, ringx_attention, window
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.ranks import Kept, Ranks
from fserver.ringx.window import window_of

NAMES = [name for name, how in ALGORITHMS.items() if how.together]
THREE = (1, 2, 3)


def test_which():
    assert NAMES == ["X3", "X3b", "X4"]


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", GROUPS, ids=str)
def test_is_exact_whatever_memory_holds(world: World, members: tuple[int, ...], algorithm: str):
    check(world, members, Problem(batch=2), algorithm, function=in_window_poisoned)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(heads=4, kv_heads=2, sink=True),
        Problem(heads=5, kv_heads=1, rows=42, keys=42, dim=7),
        Problem(batch=2, level=-120.0),
    ],
    ids=["gqa-sink", "mqa-odd", "lse-120"],
)
@pytest.mark.parametrize("algorithm", NAMES)
def test_shapes_and_ranges(world: World, algorithm: str, problem: Problem):
    check(world, THREE, problem, algorithm, function=in_window)


@pytest.mark.parametrize("algorithm", NAMES)
def test_strided_tensors_and_repeated_backward(world: World, algorithm: str):
    problem = Problem(batch=2, heads=4, kv_heads=2)
    check(world, (0, 1, 2, 3), problem, algorithm, function=in_window, strided=True, repeats=3)


def in_a_row(me: Rank, problems: list[Problem], algorithm: str) -> list[torch.Tensor]:
    """out of each problem, without a word between two."""
    how = ROWS[algorithm]
    found = []
    with windowed(me), torch.no_grad():
        for problem in problems:
            mine = positions(problem.rows, how.layout, me.rank, me.size)
            q, k, v = (t[:, mine] for t in problem.tensors()[:3])
            options = {"algorithm": algorithm, "causal": how.causal, "agreed": True, "copies": True}
            found.append(ringx_attention(q, k, v, group=me.group, **options))
    return found


@pytest.mark.parametrize("algorithm", NAMES)
def test_nobody_overwrites_what_others_want(world: World, algorithm: str):
    problems = [Problem(seed=seed) for seed in range(20)]
    parts = world.run((0, 1, 2, 3), in_a_row, problems, algorithm)
    for problem, found in zip(problems, zip(*parts, strict=True), strict=True):
        want = dense(problem, ROWS[algorithm].causal)["out"].detach()
        got = assembled([{"out": out} for out in found], problem, algorithm)["out"]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_keys_of_another_sequence(world: World):
    check(world, THREE, Problem(batch=2, keys=18), "X3b", function=in_window)


@pytest.mark.parametrize("algorithm", NAMES)
def test_error_of_a_type_is_that_of_collectives(world: World, algorithm: str):
    problem = Problem(rows=96, keys=96, heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16)
    want = dense(problem, ROWS[algorithm].causal)
    found = {}
    for function in (attend, in_window):
        parts = world.run((0, 1, 2, 3), function, problem, algorithm)
        found[function] = errors(assembled(parts, problem, algorithm), want)
    for name, error in found[in_window].items():
        assert error <= 1.5 * found[attend][name] + 1e-6, (name, found)


def moved(me: Rank, problem: Problem, algorithm: str, room: int | None = None) -> Any:
    """Bytes that were copied, and collectives."""
    with windowed(me, room) as made:
        collectives, *_ = counted(me, problem, algorithm, False, copies=True)
        return made.moved, collectives


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", GROUPS[1:4], ids=str)
def test_moves_what_the_formulas_say(world: World, members: tuple[int, ...], algorithm: str):
    problem = Problem(batch=2, heads=4, kv_heads=2, dtype=torch.bfloat16)
    size = len(members)
    keys = 2 * problem.batch * problem.kv_heads * problem.keys * problem.dim * 2
    for rank, (copied, collectives) in enumerate(world.run(members, moved, problem, algorithm)):
        of_each = keys / size
        seen = (size - 1 - rank / 2) * of_each if algorithm != "X3b" else (size - 1) * of_each
        assert copied == 3 * seen  # keys forward, keys and gradients backward
        assert collectives == {}


def test_collectives_where_the_window_is_too_small(world: World):
    """Backward by collectives behind a forward by copies, and all by collectives."""
    problem = Problem(batch=2, dtype=torch.float64)
    keys = 2 * problem.batch * problem.kv_heads * problem.keys * problem.dim * 8
    for room, alone in ((keys // 3, False), (0, True)):
        check(world, THREE, problem, "X3", function=in_window, room=room)
        copied, collectives = world.run(THREE, moved, problem, "X3", room)[0]
        assert bool(copied) is not alone
        assert collectives["reduce_scatter_tensor"][0] == 1


def not_asked(me: Rank) -> int:
    with windowed(me) as made:
        attend(me, Problem(), "X3")
        return made.moved


def test_only_for_who_asks(world: World):
    assert world.run((0, 1), not_asked) == [0, 0]


def without_gpus(me: Rank) -> bool:
    return window_of(Ranks(me.group), torch.device("cpu")) is None


def test_none_without_gpus(world: World):
    assert all(world.run((0, 1), without_gpus))


def test_places(monkeypatch: pytest.MonkeyPatch):
    """Who turns off peer access for collectives gets no copies either."""
    monkeypatch.setattr(window, "_gpu", lambda index: f"gpu {index}")
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    host, gpu = window._place(torch.device("cuda", 0))
    assert host and gpu == "gpu 0"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert window._place(torch.device("cuda", 0)) == ("", "gpu 0")


@pytest.mark.parametrize(
    ("others", "good"),
    [
        ([("a", "gpu 1")], True),
        ([("a", "gpu 1"), ("a", "gpu 3")], False),
        ([("a", "gpu 2")], False),
        ([("a", "gpu 0")], False),
        ([("b", "gpu 1")], False),
    ],
    ids=["reached", "not seen", "no peer access", "the same", "another host"],
)
def test_reach(monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, str]], good: bool):
    monkeypatch.setattr(window, "_gpu", lambda index: f"gpu {index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: two != 2)
    assert window._reach(torch.device("cuda", 0), [("a", "gpu 0"), *others]) is good
    assert not window._reach(torch.device("cuda", 0), [("", "gpu 0"), ("", "gpu 1")])


class Told(Ranks):
    """One rank, which hears what `ask` is said to return."""

    def __init__(self, answers: list[object]):
        self.size, self.kept, self.answers = 2, Kept(), iter(answers)

    def ask(self, value: object, hint: str = "") -> list[object]:
        return [value, next(self.answers)]


def test_one_rank_without_copies_is_none_for_all(monkeypatch: pytest.MonkeyPatch):
    """Nobody makes a window, and nobody asks again."""
    monkeypatch.setattr(window, "_place", lambda device: ("a", "gpu 0"))
    monkeypatch.setattr(window, "_reach", lambda device, places: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(window, "_made", lambda *_: "a window")
    for good, want in ((False, None), (True, "a window")):
        ranks = Told([("a", "gpu 1"), good])
        assert window_of(ranks, torch.device("cuda", 0)) == want
        assert window_of(ranks, torch.device("cuda", 0)) == want


def test_window_is_not_made_with_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch):
    """It is no reason to go on with collectives, which would wait for the rank again."""

    def missing(*_: object) -> None:
        raise fserver.TimeoutError("rank 1 does not come")

    monkeypatch.setattr(window, "Window", missing)
    with pytest.raises(fserver.TimeoutError, match="rank 1 does not come"):
        window._made(Told([]), torch.device("cuda", 0))


class Paired(Ranks):
    """Two ranks that are threads. An `ask` that the other does not make fails."""

    timeout = timedelta(seconds=60)

    def __init__(self, rank: int, both: threading.Barrier, texts: list[object]):
        self.rank, self.size, self.kept, self.step = rank, 2, Kept(), "forward"
        self._both, self._texts = both, texts

    def ask(self, value: Any, hint: str = "") -> list[Any]:
        self._texts[self.rank] = value
        self._both.wait()
        answers = [*self._texts]
        self._both.wait()
        return answers


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a window calls of CUDA does nothing, and there is no memory that ranks share."""
    for name in ("Stream", "synchronize", "empty_cache", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: None)

    def empty(*_: object, **__: object) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(_symmetric_memory, "empty", empty)


def both(function: Callable[[Paired], Any]) -> list[Any]:
    """What it returns for each of two ranks."""
    barrier, texts = threading.Barrier(2, timeout=10), [None, None]
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(function, (Paired(rank, barrier, texts) for rank in range(2)))]


@pytest.mark.parametrize("where", [(), (0,), (0, 1)], ids=["memory", "one rank", "both"])
def test_ranks_that_cannot_make_a_window_ask_as_often(
    monkeypatch: pytest.MonkeyPatch, no_gpu: None, where: tuple[int, ...]
):
    """Whatever fails, and where: no rank waits for an answer that the other does not give."""

    class Failing(window.Window):
        def __init__(self, ranks: Ranks, device: torch.device):
            if ranks.rank in where:
                raise RuntimeError("no stream")
            super().__init__(ranks, device)

    monkeypatch.setattr(window, "Window", Failing)
    with pytest.warns(UserWarning, match="ranks cannot copy here|for want of"):
        assert both(lambda ranks: window._made(ranks, torch.device("cuda", 0))) == [None, None]


def test_later_errors_do_not_name_the_memory_for_copies(no_gpu: None):
    """An error names what the ranks do when it comes: forward, not what went before."""

    def reserved(ranks: Paired) -> tuple[bool, str]:
        made = window.Window(ranks, torch.device("cuda", 0))
        return made.reserve(ranks, "keys", 1), ranks.step

    with pytest.warns(UserWarning, match="collectives for want of 1 bytes: no such memory"):
        assert both(reserved) == [(False, "forward")] * 2


def test_a_rank_that_cannot_join_the_others_memory(monkeypatch: pytest.MonkeyPatch, no_gpu: None):
    """Whatever the error is, both hear of it."""
    rank_of = threading.local()

    def joined(*_: object) -> None:
        if rank_of.rank:
            raise ValueError("no such handle")

    def reserved(ranks: Paired) -> bool:
        rank_of.rank, ranks.group = ranks.rank, SimpleNamespace(group_name="")
        return window.Window(ranks, torch.device("cuda", 0)).reserve(ranks, "keys", 1)

    monkeypatch.setattr(_symmetric_memory, "empty", lambda *_, **__: torch.empty(1))
    monkeypatch.setattr(_symmetric_memory, "rendezvous", joined)
    with pytest.warns(UserWarning, match="1 bytes: (no such handle|another rank cannot)"):
        assert both(reserved) == [False, False]


def mutated(me: Rank, *args: Any) -> Any:
    with windowed(me):
        return attend_mutated(me, *args, copies=True)


NOT_COPIED = "to[keys].copy_(grad)"
NOT_TAKEN = "self._take(len(self._rounds) - 1)"


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (GLOBAL, LOCAL, {"dq", "dk", "dv"}),
        (NOT_COPIED, "pass", {"dk", "dv"}),
        (NOT_TAKEN, "pass", {"dk", "dv"}),
    ],
)
def test_faults_are_seen(world: World, algorithm: str, old: str, new: str, wrong: set[str]):
    assert made_wrong(world, mutated, algorithm, old, new) == wrong
