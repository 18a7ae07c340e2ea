"""ringx under torch.compile: one graph, with one operator forward and one backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import exact
import pytest
import torch
from exact import Problem, attend, check
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from world import LIMIT, Rank, World

from fserver.ringx import api, kernels, ringX3_attn_func, ringx_attention, shard
from fserver.ringx.ranks import ranks_of

TWO = (2, 3)
"""A group of two that does not start at rank 0."""


def fresh() -> None:
    """Forgets what was compiled. inductor then runs the C++ compiler once a graph, in this process:
    it does not try what the processor has, and makes no header of torch ready."""
    torch._dynamo.reset()
    config = torch._inductor.config
    config.compile_threads = 1  # no pool of processes that outlives the test
    config.force_disable_caches = True  # which know operators by name alone
    config.cpp.vec_isa_ok, config.cpp_cache_precompile_headers = False, False


def compiled(me: Rank, *args: Any, backend: str = "aot_eager", **options: Any) -> Any:
    """As attend, with the call compiled."""
    torch._dynamo.reset()
    exact.ringx_attention = torch.compile(ringx_attention, fullgraph=True, backend=backend)
    try:
        return attend(me, *args, **options)
    finally:
        exact.ringx_attention = ringx_attention


@pytest.mark.parametrize(
    "algorithm", ["X1o", "X2", "X3", "X3b", "X4o", "ring", "ring full", "ulysses"]
)
def test_is_exact(world: World, algorithm: str):
    problem = Problem(batch=2, heads=4, kv_heads=2, sink=True)
    check(world, (1, 2, 3), problem, algorithm, function=compiled)


def test_lengths_that_differ(world: World):
    problem, lengths = Problem(rows=12, keys=12), ((5, 7), (5, 7))
    check(world, TWO, problem, "X2", lengths, function=compiled)


class Block(torch.nn.Module):
    """What a trainer compiles: attention between products."""

    def __init__(self, **how: Any):
        super().__init__()
        torch.manual_seed(7)
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.out = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        y = ringx_attention(q, k, v, **self.how)
        return torch.nn.functional.gelu(self.out(y.flatten(2)))


def trained(me: Rank, backend: str) -> tuple[float, list[int]]:
    """The largest error of outputs and gradients against the same module uncompiled, for three
    lengths, and how many graphs were compiled before and after the third."""
    fresh()
    how = {"causal": True, "layout": "zigzag", "group": me.group}
    worst, graphs = 0.0, []
    block, plain = Block(**how), Block(**how)
    fast = torch.compile(block, fullgraph=True, backend=backend)
    for length in (16, 32, 64):
        x = torch.randn(2, length, 16, dtype=torch.float64, generator=torch.manual_seed(length))
        x = shard(x, "zigzag", me.rank, me.size)
        pairs = []
        for module in (fast, plain):
            y = module(x)
            grads = torch.autograd.grad(y.square().sum(), [*module.parameters()])
            pairs.append((y, *grads))
        for got, want in zip(*pairs, strict=True):
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return worst, graphs


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_module(world: World, backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LIMIT, "cpu", 300.0)  # a compiler of C++
    for worst, graphs in world.run(TWO, trained, backend):
        assert worst < 1e-12
        assert graphs[1] == graphs[2], "a graph for each length"


def unused(me: Rank, backend: str) -> list[int]:
    """How many calls are made whose result is not used, without and with a gradient."""
    fresh()

    def call(q: torch.Tensor) -> torch.Tensor:
        ringx_attention(q, q, q, causal=True, group=me.group)
        return q + 1

    fast, found = torch.compile(call, fullgraph=True, backend=backend), []
    kept = ranks_of(me.group).kept
    for wanted in (False, True):
        before = kept.calls
        fast(torch.randn(1, 8, 2, 8).requires_grad_(wanted))
        found.append(kept.calls - before)
    return found


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_calls_whose_result_is_not_used(world: World, backend: str, monkeypatch: Any):
    """They are made: other ranks may use theirs, and wait."""
    monkeypatch.setitem(LIMIT, "cpu", 300.0)
    assert world.run(TWO, unused, backend) == [[1, 1]] * 2


def checkpointed(me: Rank) -> tuple[list[int], float]:
    """The calls of two layers that are computed again in backward, plain and compiled, and the
    difference of their gradients."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        return x + ringx_attention(x, x, x, causal=True, group=me.group).sin()

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()

    torch._dynamo.reset()
    x = torch.randn(1, 8, 2, 8, dtype=torch.float64, generator=torch.manual_seed(me.rank))
    kept, calls, grads = ranks_of(me.group).kept, [], []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        before = kept.calls
        grads += torch.autograd.grad(call(x.requires_grad_()), x)
        calls.append(kept.calls - before)
    return calls, float((grads[0] - grads[1]).abs().max())


def test_checkpointed_layers(world: World):
    for calls, error in world.run(TWO, checkpointed):
        assert calls == [4, 4] and error < 1e-12


def alone(me: Rank) -> tuple[float, set[str]]:
    """The error of lse with inductor, for a batch, and what torch says of the operator."""
    fresh()
    q = torch.randn(2, 8, 4, 16, generator=torch.manual_seed(1))
    call = partial(ringx_attention, causal=True, group=me.group, return_lse=True)
    out, lse = torch.compile(call, fullgraph=True, backend="inductor")(q, q, q)
    name = me.group.group_name
    how = (name, "auto", True, None, None, torch.float32, None, False, None, False)
    said = torch.library.opcheck(api._opaque, (q, q, q, None, None, *how))
    return float((lse - call(q, q, q)[1]).abs().max()), {*said.values()}


def test_one_rank_and_a_batch(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LIMIT, "cpu", 300.0)
    ((error, said),) = world.run((3,), alone)
    assert error < 1e-6 and said == {"SUCCESS"}


def like_the_reference(me: Rank) -> float:
    """The difference to the same call that is not compiled."""
    torch._dynamo.reset()
    call = partial(ringX3_attn_func, causal=True, group=me.group)
    q, k, v = torch.randn(3, 1, 8, 2, 8, dtype=torch.float64, generator=torch.manual_seed(me.rank))
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    with pytest.raises(Exception, match="dropout_p 0.5 of type float: want 0.0"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, dropout_p=0.5)
    return float((out - call(q, k, v)).abs().max())


def test_functions_of_the_reference(world: World):
    assert world.run(TWO, like_the_reference) == [0, 0]


def kernels_of_backward(me: Rank) -> list[str]:
    """The kernels of a compiled forward and of its backward, which runs outside of the context."""
    torch._dynamo.reset()
    used: list[str] = []
    choose = kernels.choose

    def noted(*args: Any) -> Any:
        used.append((kernel := choose(*args)).name)
        return kernel

    kernels.choose = noted
    try:
        q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 8, 2, 8))
        call = partial(ringx_attention, causal=True, group=me.group, agreed=True)
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
        out.sum().backward()
    finally:
        kernels.choose = choose
    return used


def test_backward_has_the_kernels_of_forward(world: World):
    for used in world.run(TWO, kernels_of_backward):
        assert len(used) > 2 and {*used} == {"reference"}


def refused(me: Rank) -> list[str]:
    """What a compiled call raises when one rank has another head dimension."""
    torch._dynamo.reset()
    call = torch.compile(
        partial(ringx_attention, causal=False, group=me.group), fullgraph=True, backend="eager"
    )
    q = torch.zeros(1, 4, 2, 8 if me.rank else 16)
    try:
        call(q, q, q)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def test_all_ranks_refuse(world: World):
    for kind, text in world.run(TWO, refused):
        assert kind == "ShapeError" and "q.shape[3] is 16 on rank 0 and 8 on rank 1" in text
