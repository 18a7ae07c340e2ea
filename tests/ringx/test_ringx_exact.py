"""ringx against dense attention in float64, forward and backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exact import (
    CAUSAL,
    NAMES,
    ROWS,
    Problem,
    assembled,
    attend,
    check,
    dense,
    errors,
    fitted,
    poisoned,
)
from exact import shard as shard_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from world import GROUPS, Rank, World

from fserver.ringx import kernels, positions, ringx_attention, shard, unshard
from fserver.ringx.ranks import Ranks

THREE = (1, 2, 3)
"""A group of three that does not start at rank 0."""


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", GROUPS, ids=str)
def test_is_exact_whatever_memory_holds(world: World, members: tuple[int, ...], algorithm: str):
    check(world, members, Problem(batch=2), algorithm, function=poisoned)


@pytest.mark.parametrize("algorithm", NAMES)
def test_memory_of_a_kernel_with_its_own_lse(world: World, algorithm: str):
    """That for float32 on a CPU gives lse with gaps, which combining does not write over."""
    problem = Problem(batch=2, dtype=torch.float32)
    check(world, THREE, problem, algorithm, function=poisoned, limit=1e-5)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(heads=4, kv_heads=2, sink=True),
        Problem(heads=5, kv_heads=1, rows=42, keys=42, dim=7),
        Problem(heads=5, kv_heads=5, level=120.0, sink=True),
        Problem(batch=2, level=-120.0),
    ],
    ids=["gqa-sink", "mqa-odd", "lse+120-sink", "lse-120"],
)
@pytest.mark.parametrize("algorithm", NAMES)
def test_shapes_and_ranges(world: World, algorithm: str, problem: Problem):
    check(world, THREE, problem, algorithm)


@pytest.mark.parametrize("algorithm", NAMES)
def test_without_asking(world: World, algorithm: str):
    check(world, THREE, Problem(heads=4, kv_heads=2, sink=True), algorithm, agreed=True)


@pytest.mark.parametrize("algorithm", NAMES)
def test_strided_tensors_and_repeated_backward(world: World, algorithm: str):
    problem = Problem(batch=2, heads=4, kv_heads=2)
    check(world, THREE, problem, algorithm, strided=True, repeats=2)


@pytest.mark.parametrize("algorithm", ["X1", "X1o"])
@pytest.mark.parametrize("lengths", [((9, 0, 4), (2, 10, 1)), ((1, 11, 1), (6, 0, 7))], ids=str)
def test_uneven_lengths_and_keys_of_another_sequence(world: World, algorithm: str, lengths):
    rows, keys = map(sum, lengths)
    problem = Problem(batch=2, rows=rows, keys=keys, heads=4, sink=True)
    check(world, THREE, problem, algorithm, lengths, function=poisoned)


@pytest.mark.parametrize("algorithm", ["X2", "X2o"])
def test_uneven_lengths_under_a_causal_mask(world: World, algorithm: str):
    lengths = (7, 1, 5), (7, 1, 5)
    check(world, THREE, Problem(rows=13, keys=13), algorithm, lengths, function=poisoned)


def test_keys_of_another_sequence_can_be_gathered(world: World):
    check(world, THREE, Problem(rows=9, keys=15), "X3b", function=poisoned)


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long), torch.float32],
    ids=str,
)
def test_error_of_a_type_is_that_of_one_process(world: World, algorithm: str, dtype: torch.dtype):
    shape = {"rows": 96, "keys": 96, "heads": 4, "kv_heads": 2, "dim": 16}
    # Several: one whose few numbers happen to be exact says nothing of a kernel.
    problems = [Problem(**shape, sink=True, dtype=dtype, seed=seed) for seed in range(4)]
    wants = [dense(problem, ROWS[algorithm].causal) for problem in problems]

    def worst(members: tuple[int, ...]) -> tuple[dict[str, float], float]:
        """The largest errors, and what of dsink's is that each process rounds its own."""
        found: dict[str, float] = {}
        rounded = 0.0
        for problem, want in zip(problems, wants, strict=True):
            parts = world.run(members, attend, problem, algorithm)
            error = errors(assembled(parts, problem, algorithm), want)
            found = {name: max(e, found.get(name, 0.0)) for name, e in error.items()}
            level = sum(float(part["dsink"].abs().max()) for part in parts)
            rounded = max(rounded, level / float(want["dsink"].abs().max()) * eps / 2)
        return found, rounded

    eps = torch.finfo(dtype).eps
    (alone, _), (together, rounded) = worst((0,)), worst((0, 1, 2, 3))
    for name, error in together.items():
        more = rounded if name == "dsink" else 0.0
        assert error <= 2 * alone[name] + eps / 8 + more, (name, alone, together)


def reference(me: Rank, *args) -> dict[str, torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
        return attend(me, *args)


def test_other_kernels_can_be_chosen_and_types_stay(world: World):
    problem = Problem(heads=4, kv_heads=2, dtype=torch.float32)
    check(world, (0, 1), problem, "X3", function=reference, limit=1e-5)


def kernels_of_backward(me: Rank, algorithm: str) -> tuple[set[str], str]:
    """The kernels of a backward outside of the context of its forward, and the one behind it."""
    q, k, v, *_ = (t.requires_grad_() for t in Problem(dtype=torch.float32).tensors())
    where = positions(24, ROWS[algorithm].layout, me.rank, me.size)
    options: Any = {"algorithm": ROWS[algorithm].algorithm, "causal": ROWS[algorithm].causal}
    with sdpa_kernel(SDPBackend.MATH):
        out = ringx_attention(q[:, where], k[:, where], v[:, where], group=me.group, **options)
    names = set()

    def noted(*args: Any) -> kernels.Kernel:
        kernel = choose(*args)
        names.add(kernel.name)
        return kernel

    choose = kernels.choose
    with mock.patch.object(kernels, "choose", noted):
        out.sum().backward()
    return names, kernels.choose(*(t.transpose(1, 2) for t in (q, k, v)), False).name


@pytest.mark.parametrize("algorithm", NAMES)
def test_backward_has_the_kernels_of_forward(world: World, algorithm: str):
    """Behind it, all are enabled again."""
    found = world.run((0, 1), kernels_of_backward, algorithm)
    assert found == [({"reference"}, "cpu flash")] * 2


def perturbed(me: Rank, algorithm: str, position: int) -> tuple[bool, bool]:
    """Do rows before the position, and rows after it, stay what they were, when keys and values
    from there on are others?"""
    q, k, v, *_ = fitted(Problem(), algorithm, me.size).tensors()
    how = ROWS[algorithm]
    mine = positions(24, how.layout, me.rank, me.size)
    k_after, v_after = k.clone(), v.clone()
    k_after[:, position:] += 1
    v_after[:, position:] -= 1
    with torch.no_grad():
        before, after = (
            ringx_attention(
                q[:, mine],
                k[:, mine],
                v[:, mine],
                algorithm=how.algorithm,
                causal=True,
                group=me.group,
            )  # fmt: skip
            for k, v in ((k, v), (k_after, v_after))
        )
    past = mine < position
    same = (before == after).all(-1).all(-1)[0]
    return bool(same[past].all()), bool(same[~past].any())


@pytest.mark.parametrize("algorithm", CAUSAL)
@pytest.mark.parametrize("position", [1, 8, 13])
def test_the_future_has_no_influence(world: World, algorithm: str, position: int):
    answers = world.run(THREE, perturbed, algorithm, position)
    assert all(past for past, _ in answers)
    assert not any(future for _, future in answers)


def without_grad(me: Rank, problem: Problem, algorithm: str) -> torch.Tensor:
    how = ROWS[algorithm]
    mine = positions(problem.rows, how.layout, me.rank, me.size)
    q, k, v = (t[:, mine].requires_grad_() for t in problem.tensors()[:3])
    with torch.no_grad():
        out = ringx_attention(q, k, v, algorithm=how.algorithm, causal=how.causal, group=me.group)
    assert not out.requires_grad
    return out


@pytest.mark.parametrize("algorithm", NAMES)
def test_no_grad(world: World, algorithm: str):
    problem = Problem()
    parts = [{"out": out} for out in world.run((2, 3), without_grad, problem, algorithm)]
    want = {"out": dense(problem, ROWS[algorithm].causal)["out"]}
    assert errors(assembled(parts, problem, algorithm), want)["out"] <= 1e-12


def checkpointed(me: Rank, algorithm: str) -> bool:
    """Whether a forward that backward computes again gives the same gradients."""
    how, problem = ROWS[algorithm], fitted(Problem(heads=4, kv_heads=2), algorithm, me.size)
    leaves = shard_of(me, problem, how.layout).leaves

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        return ringx_attention(*qkv, algorithm=how.algorithm, causal=how.causal, group=me.group)

    found = []
    for call in (attention, lambda *qkv: checkpoint(attention, *qkv, use_reentrant=False)):
        found.append(torch.autograd.grad(call(*leaves).square().sum(), leaves))
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("algorithm", NAMES)
def test_checkpointing(world: World, algorithm: str):
    assert all(world.run(THREE, checkpointed, algorithm))


class Everywhere(torch.autograd.Function):
    """Tensors that all ranks have. Their gradient is the sum of what each rank's use of them
    gives."""

    @staticmethod
    def forward(ctx: Any, me: Rank, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.me = me
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        sums = [grad.clone() for grad in grads]
        for grad in sums:
            dist.all_reduce(grad, group=ctx.me.group)
        return None, *sums


class Whole(torch.autograd.Function):
    """The ranks' parts as one sequence, the same on all. All do with it the same."""

    @staticmethod
    def forward(ctx: Any, me: Rank, layout: str, part: torch.Tensor) -> torch.Tensor:
        ctx.me, ctx.layout = me, layout
        parts = [torch.empty_like(part) for _ in range(me.size)]
        dist.all_gather(parts, part.contiguous(), group=me.group)
        return unshard(parts, layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, None, shard(grad, ctx.layout, ctx.me.rank, ctx.me.size)


def checked(me: Rank, algorithm: str) -> bool:
    """torch's own check of gradients against differences, of a function of the whole tensors that
    all ranks compute together, at the same points in the same order."""
    how = ROWS[algorithm]
    q, k, v, _, sink = Problem(rows=4, keys=4, heads=2, kv_heads=1, dim=2).tensors()

    def attention(*whole: torch.Tensor) -> torch.Tensor:
        *sequences, sink = Everywhere.apply(me, *whole)
        parts = (shard(t, how.layout, me.rank, me.size) for t in sequences)
        options = {"sink": sink, "algorithm": how.algorithm, "causal": how.causal}
        return Whole.apply(me, how.layout, ringx_attention(*parts, group=me.group, **options))

    return torch.autograd.gradcheck(attention, [t.requires_grad_() for t in (q, k, v, sink)])


@pytest.mark.parametrize("algorithm", NAMES)
@pytest.mark.parametrize("members", [pytest.param((0,), marks=pytest.mark.long), (2, 3)], ids=str)
def test_gradcheck(world: World, members: tuple[int, ...], algorithm: str):
    assert all(world.run(members, checked, algorithm))


def of_sink(me: Rank) -> float:
    """The relative error of the gradient of a sink in float32, against its formula in float64 with
    out and lse as they are returned."""
    q, k, v, dout = torch.randn(4, 1, 32, 2, 8, generator=torch.manual_seed(7)).bfloat16()
    sink = torch.tensor([0.5, -0.5]).requires_grad_()
    out, lse = ringx_attention(q, k, v, causal=True, group=me.group, sink=sink, return_lse=True)
    out.backward(dout)
    share = torch.exp(sink.detach().double()[:, None] - lse.detach().double())[0].T
    want = -(share * (dout.double() * out.detach().double()).sum(-1)[0]).sum(0)
    return float((sink.grad - want).abs().max() / want.abs().max())


def test_the_gradient_of_a_sink_is_in_the_type_of_lse(world: World):
    assert max(world.run((3,), of_sink)) < 1e-5


def wire_type(me: Rank, algorithm: str) -> list[torch.dtype]:
    """Types of what is added up over ranks."""
    seen: list[torch.dtype] = []
    before = Ranks.sum_at, Ranks.scatter_sum

    def at(self: Ranks, owner: int, tensor: torch.Tensor) -> dist.Work:
        seen.append(tensor.dtype)
        return before[0](self, owner, tensor)

    def scatter(self: Ranks, mine: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        seen.append(tensor.dtype)
        return before[1](self, mine, tensor)

    Ranks.sum_at, Ranks.scatter_sum = at, scatter
    try:
        for dtype in (torch.bfloat16, torch.float64):
            attend(me, Problem(dtype=dtype), algorithm)
        attend(me, Problem(dtype=torch.float16), algorithm, reduce_dtype=torch.float16)
    finally:
        Ranks.sum_at, Ranks.scatter_sum = before
    return seen


@pytest.mark.parametrize("algorithm", ["X1", "X3", "X4"])
def test_sums_over_ranks_are_in_float32_or_better_by_default(world: World, algorithm: str):
    seen = world.run((0, 1), wire_type, algorithm)[0]
    third = len(seen) // 3
    assert set(seen[:third]) == {torch.float32}
    assert set(seen[third : 2 * third]) == {torch.float64}
    assert set(seen[2 * third :]) == {torch.float16}
