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
from exact import (
    EXACT,
    NAMES,
    ROWS,
    Problem,
    assembled,
    attend,
    dense,
    errors,
    fitted,
    poison,
)
from world import GROUPS, Rank, World

from fserver.ringx import api, copies, exchanges, heads, kernels, positions, schedules
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.combine import Parts
from fserver.ringx.ranks import Ranks

COLLECTIVES = {  # the tensor whose bytes count: that of all ranks, where there are two
    "broadcast": 0,
    "reduce": 0,
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 0,
    "batch_isend_irecv": 0,
}

Traffic = dict[str, tuple[int, int]]  # count and bytes of each collective


def counted(
    me: Rank, problem: Problem, algorithm: str, agreed: bool, **options: Any
) -> tuple[Traffic, int, int]:
    """The collectives of a forward and a backward, calls of forward kernels, and comparisons."""
    seen: Traffic = {}
    calls = asks = 0
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    forward, ask = kernels.forward, Ranks.ask

    def counting(name: str) -> Any:
        def collective(*args: Any, **options: Any) -> Any:
            tensor = args[COLLECTIVES[name]]
            if name == "batch_isend_irecv":
                (tensor,) = (op.tensor for op in tensor if op.op is dist.isend)
            count, size = seen.get(name, (0, 0))
            seen[name] = count + 1, size + tensor.numel() * tensor.element_size()
            return before[name](*args, **options)

        return collective

    def kernel(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args)

    def asking(*args: Any) -> Any:
        nonlocal asks
        asks += 1
        return ask(*args)

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    kernels.forward, Ranks.ask = kernel, asking
    try:
        attend(me, problem, algorithm, agreed=agreed, **options)
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, before[name])
        kernels.forward, Ranks.ask = forward, ask
    return seen, calls, asks


def formulas(problem: Problem, algorithm: str, size: int) -> Traffic:
    """The tables of docs/ringx.md; of a ring, what each rank sends."""
    element = problem.dtype.itemsize
    summed = max(element, 4)
    queries = problem.batch * problem.heads * problem.rows
    keys = 2 * problem.batch * problem.kv_heads * problem.keys * problem.dim
    if algorithm in ("X1", "X1o", "X2", "X2o"):
        moved = queries * problem.dim * element + keys * element
        added = queries * (problem.dim + 1) * summed + keys * summed
        return {
            "broadcast": (2 * size, moved),
            "all_reduce": (size, queries * summed),
            "reduce": (2 * size, added),
        }
    if algorithm in ("X4", "X4o"):
        return {
            "broadcast": (2 * size, 2 * keys * element),
            "reduce": (size, keys * summed),
        }
    if algorithm.startswith("ring"):
        if size == 1:
            return {}
        sent = 2 * (size - 1) * keys * element + size * keys * summed
        return {"batch_isend_irecv": (3 * size - 2, sent // size)}
    if algorithm.startswith("ulysses"):
        times = heads.repeats(problem.kv_heads, size)
        # A kernel of a CPU repeats heads, and adds up dk and dv in float32.
        summed = 4 if problem.heads > problem.kv_heads * times else element
        # q, out, dout, q, out and dq; k and v, again, and their gradients; lse, again
        moved = 6 * queries * problem.dim * element + 2 * queries * 4
        moved += times * keys * (2 * element + summed)
        return {"all_to_all_single": (14, moved // size)}
    return {
        "all_gather_into_tensor": (2, 2 * keys * element),
        "reduce_scatter_tensor": (1, keys * summed),
    }


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", GROUPS[:4], ids=str)
def test_moves_what_the_formulas_say(world: World, members, algorithm: str, agreed: bool):
    problem = Problem(batch=2, heads=4, kv_heads=2, dtype=torch.bfloat16)
    want = formulas(fitted(problem, algorithm, len(members)), algorithm, len(members))
    answers = world.run(members, counted, problem, algorithm, agreed)
    for seen, _, asks in answers:
        assert seen == want
        assert asks == (not agreed)
    calls = max(calls for _, calls, _ in answers)
    most = {"X3": 3, "X3b": 3, "ulysses": 1, "ulysses full": 1}.get(algorithm, len(members))
    assert calls == min(len(members), most)


def kept_apart(me: Rank, problem: Problem, algorithm: str) -> int:
    """The most parts of out, or of dq, that are in memory at a time."""
    most, add = 0, Parts.add

    def adding(self: Parts, *args: Any, **options: Any) -> None:
        nonlocal most
        add(self, *args, **options)
        most = max(most, len(self._parts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "add", adding)
        attend(me, problem, algorithm)
    return most


@pytest.mark.parametrize("algorithm", NAMES)
def test_parts_take_least_memory_unless_all_keys_are_there(world: World, algorithm: str):
    """The ring too has one owner's keys at a time."""
    problem = fitted(Problem(), algorithm, 4)
    most = max(world.run((0, 1, 2, 3), kept_apart, problem, algorithm))
    assert most <= (5 if algorithm in ("X3", "X3b") else 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_calls_are_what_is_before_each_row(size: int):
    half = 2
    places = [positions(size * 2 * half, "zigzag", rank, size).tolist() for rank in range(size)]
    for rank in range(size):
        place, kind = _Place(rank, size), torch.float32
        lengths = [2 * half] * size
        job = schedules.Job(place, schedules.zigzag, 1.0, lengths, lengths, kind, kind)
        own, *calls = exchanges.planned(job)
        assert len(calls) <= 2
        assert own.keys == [slice(rank * 2 * half, (rank + 1) * 2 * half)] and own.mask is True
        found = []
        for call in calls:
            for key in (key for keys in call.keys for key in range(keys.start, keys.stop)):
                owner, at = divmod(key, 2 * half)
                seen = places[owner][at]
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
    found = {
        module.__name__: inspect.getsource(module)
        for module in (schedules, exchanges, copies, heads)
    }
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
    row = ROWS[algorithm].algorithm
    how = ALGORITHMS[row]

    def swapped(function: Any) -> Any:
        """The function, or the exchange, of the changed module; also within a partial."""
        if isinstance(function, partial):
            options = {key: swapped(value) for key, value in function.keywords.items()}
            return partial(swapped(function.func), **options)
        return getattr(module, function.__name__) if is_of_it(function) else function

    def is_of_it(function: Any) -> bool:
        return getattr(function, "__module__", None) == name

    ALGORITHMS[row] = how._replace(forward=swapped(how.forward), backward=swapped(how.backward))
    if name == copies.__name__:
        api.by_copies = module
    if name == schedules.__name__:
        api.schedules = module
    try:
        with poison():
            return attend(me, problem, algorithm, **options)
    finally:
        ALGORITHMS[row] = how
        api.by_copies, api.schedules = copies, schedules


def made_wrong(
    world: World, function: Callable[..., Any], algorithm: str, old: str, new: str
) -> set[str]:
    """What is wrong of what three ranks find with a changed text."""
    problem = fitted(Problem(), algorithm, 3)
    parts = world.run((0, 1, 2), function, problem, algorithm, old, new)
    want = dense(problem, ROWS[algorithm].causal)
    found = errors(assembled(parts, problem, algorithm), want)
    return {name for name, error in found.items() if error > EXACT}


NOT_WRITTEN = "zero_between(grads, written)"
NOT_WRITTEN_X4 = "zero_between(dkv, written)"
GLOBAL = "some = Given(dout[:, rows], q[:, rows], k, v, out[:, rows], lse[:, :, rows])"
LOCAL = """local = kernels.forward(q[:, rows], k, v, bool(mask), job.scale)
        some = Given(dout[:, rows], q[:, rows], k, v, *local)"""


@pytest.mark.parametrize(
    ("algorithm", "old", "new", "wrong"),
    [
        ("X3", NOT_WRITTEN, "pass", {"dk", "dv"}),
        ("X2", NOT_WRITTEN_X4, "pass", {"dk", "dv"}),
        ("X4", NOT_WRITTEN_X4, "pass", {"dk", "dv"}),
        ("X1", GLOBAL, LOCAL, {"dq", "dk", "dv"}),
        ("X3", GLOBAL, LOCAL, {"dq", "dk", "dv"}),
        ("X4", GLOBAL, LOCAL, {"dq", "dk", "dv"}),
        (
            "ring",
            "add(dkv, block.keys, *got)",
            "put(dkv, block.keys, *got)",
            {"dk", "dv"},
        ),
        ("ulysses", ".sum(3, dtype=job.reduce_dtype)", "[:, :, :, 0]", {"dk", "dv"}),
    ],
)
def test_faults_are_seen(world: World, algorithm: str, old: str, new: str, wrong: set[str]):
    assert made_wrong(world, attend_mutated, algorithm, old, new) == wrong
