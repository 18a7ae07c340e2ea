"""What the schedules do: collectives, bytes, kernel calls; and that the tests see what is wrong."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import EXACT, NAMES, Problem, assembled, attend, dense, errors, poison
from world import GROUPS, Rank, World

from fserver.ringx import api, copies, kernels, positions, schedules
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.arguments import FACTS

COLLECTIVES = {  # the tensor whose bytes count: that of all ranks, where there are two
    "broadcast": 0,
    "reduce": 0,
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 1,
}

Traffic = dict[str, tuple[int, int]]  # count and bytes of each collective


def counted(
    me: Rank, problem: Problem, algorithm: str, agreed: bool, **options: Any
) -> tuple[Traffic, int]:
    """The collectives of a forward and a backward, and the calls of forward kernels."""
    seen: Traffic = {}
    calls = 0
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    forward = kernels.forward

    def counting(name: str) -> Any:
        def collective(*args: Any, **options: Any) -> Any:
            tensor = args[COLLECTIVES[name]]
            count, size = seen.get(name, (0, 0))
            seen[name] = count + 1, size + tensor.numel() * tensor.element_size()
            return before[name](*args, **options)

        return collective

    def kernel(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args)

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    kernels.forward = kernel
    try:
        attend(me, problem, algorithm, agreed=agreed, **options)
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, before[name])
        kernels.forward = forward
    return seen, calls


def formulas(problem: Problem, algorithm: str, size: int, asks: int) -> Traffic:
    """The tables of docs/ringx.md."""
    element = problem.dtype.itemsize
    summed = max(element, 4)
    queries = problem.batch * problem.heads * problem.rows
    keys = 2 * problem.batch * problem.kv_heads * problem.keys * problem.dim
    asked = asks, asks * 8 * len(FACTS) * size
    if algorithm in ("X1", "X1o", "X2", "X2o"):
        moved = queries * problem.dim * element + keys * element
        added = queries * (problem.dim + 1) * summed + keys * summed
        return {
            "all_gather_into_tensor": asked,
            "broadcast": (2 * size, moved),
            "all_reduce": (size, queries * summed),
            "reduce": (2 * size, added),
        }
    if algorithm in ("X4", "X4o"):
        return {
            "all_gather_into_tensor": asked,
            "broadcast": (2 * size, 2 * keys * element),
            "reduce": (size, keys * summed),
        }
    parts = 2 if algorithm == "X3c" else 1
    return {
        "all_gather_into_tensor": (asked[0] + 2 * parts, asked[1] + 2 * keys * element),
        "reduce_scatter_tensor": (parts, keys * summed),
    }


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", GROUPS[:4], ids=str)
def test_moves_what_the_formulas_say(world: World, members, algorithm: str, agreed: bool):
    problem = Problem(batch=2, heads=4, kv_heads=2, dtype=torch.bfloat16)
    want = formulas(problem, algorithm, len(members), 1 - agreed)
    answers = world.run(members, counted, problem, algorithm, agreed)
    for seen, _ in answers:
        assert seen == {name: counts for name, counts in want.items() if counts[0]}
    calls = max(calls for _, calls in answers)
    most = {"X3": 3, "X3b": 3, "X3c": 4}.get(algorithm, len(members))
    assert calls == min(2 * len(members) - 1 if algorithm == "X3c" else len(members), most)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_calls_are_what_is_before_each_row(size: int, pieces: int):
    """Whether the keys are gathered as they are or as halves."""
    half = 2
    places = [positions(size * 2 * half, "zigzag", rank, size).tolist() for rank in range(size)]
    for rank in range(size):
        job = schedules.Job(_Place(rank, size), 1.0, (), (), torch.float32, torch.float32)
        plan = schedules.planned(job, 2 * half, 2 * half, schedules.zigzag, pieces)
        assert len(plan.calls) <= 1 + pieces
        found = []
        for call in plan.calls:
            part = plan.parts[call.gathered]
            for key in (key for keys in call.keys for key in range(keys.start, keys.stop)):
                owner, place = divmod(key, part.stop - part.start)
                seen = places[owner][part.start + place]
                found += [(places[rank][row], seen) for row in range(*call.rows.indices(2 * half))]
        others = [place for owner in range(size) if owner != rank for place in places[owner]]
        want = [(row, key) for row in places[rank] for key in others if key < row]
        assert sorted(found) == sorted(want)
        assert len(found) == (size - 1) * 2 * half * half  # as much for every rank


class _Place:
    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


# Schedules with a fault


def mutated(old: str, new: str) -> tuple[str, ModuleType]:
    """The one module that has this piece of text, with another in its place; and its name."""
    found = {module.__name__: inspect.getsource(module) for module in (schedules, copies)}
    found = {name: text for name, text in found.items() if old in text}
    assert len(found) == 1, f"{old!r} is in {[*found]}"
    ((name, text),) = found.items()
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    spec = importlib.util.spec_from_loader("fserver.ringx.mutated", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(text.replace(old, new), spec.name, "exec"), module.__dict__)
    return name, module


def attend_mutated(
    me: Rank, problem: Problem, algorithm: str, old: str, new: str, **options: Any
) -> Any:
    name, module = mutated(old, new)
    how = ALGORITHMS[algorithm]

    def swapped(function: Any) -> Any:
        function = partial(function)
        if function.func.__module__ != name:
            return function
        return partial(getattr(module, function.func.__name__), **function.keywords)

    ALGORITHMS[algorithm] = how._replace(
        forward=swapped(how.forward), backward=swapped(how.backward)
    )
    if name == copies.__name__:
        api.by_copies = module
    try:
        with poison():
            return attend(me, problem, algorithm, **options)
    finally:
        ALGORITHMS[algorithm] = how
        api.by_copies = copies


def made_wrong(
    world: World, function: Callable[..., Any], algorithm: str, old: str, new: str
) -> set[str]:
    """What is wrong of what three ranks find with a changed text."""
    problem = Problem()
    parts = world.run((0, 1, 2), function, problem, algorithm, old, new)
    want = dense(problem, ALGORITHMS[algorithm].causal)
    found = errors(assembled(parts, problem, algorithm), want)
    return {name for name, error in found.items() if error > EXACT}


NOT_WRITTEN = "_zero_between(dkv, written)"
NOT_WRITTEN_X4 = "_zero_between(dkv, [] if block is None else [block.keys])"
GLOBAL = "return _grads(job, dq, given._replace(k=k, v=v), block)"
LOCAL = """rows, keys, causal = block
    out, lse = torch.zeros_like(given.q), torch.zeros_like(given.lse)
    out[:, rows], lse[:, :, rows] = kernels.forward(
        given.q[:, rows], k[:, keys], v[:, keys], causal, job.scale
    )
    return _grads(job, dq, given._replace(k=k, v=v, out=out, lse=lse), block)"""


@pytest.mark.parametrize(
    ("algorithm", "old", "new", "wrong"),
    [
        ("X3", NOT_WRITTEN, "pass", {"dk", "dv"}),
        ("X3c", NOT_WRITTEN, "pass", {"dk", "dv"}),
        ("X2", NOT_WRITTEN_X4, "pass", {"dk", "dv"}),
        ("X4", NOT_WRITTEN_X4, "pass", {"dk", "dv"}),
        ("X1", GLOBAL, LOCAL, {"dq", "dk", "dv"}),
        ("X3", GLOBAL, LOCAL, {"dq", "dk", "dv"}),
        ("X4", GLOBAL, LOCAL, {"dq", "dk", "dv"}),
    ],
)
def test_faults_are_seen(world: World, algorithm: str, old: str, new: str, wrong: set[str]):
    assert made_wrong(world, attend_mutated, algorithm, old, new) == wrong
