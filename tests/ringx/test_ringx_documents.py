"""Packed documents against the unsplit model with an explicit mask, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact import EXACT, Problem, dense, errors, poison
from torch.utils.checkpoint import checkpoint
from world import Rank, World

from fserver.errors import ConfigError, ShapeError
from fserver.ringx import arguments, exchanges, kernels, positions, ringx_attention, shard, unshard

RANKS = (0, 1), (1, 2, 3), (0, 1, 2, 3)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def masked(problem: Problem, ends: Sequence[int], window: int | None = None) -> dict[str, Any]:
    """out, lse and all gradients of the whole."""
    return dense(replace(problem, ends=tuple(ends), window=window), causal=True)


def attend(
    me: Rank, problem: Problem, ends: Any, layout: str = "zigzag", function: Any = None,
    packed: bool = True, **options: Any,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The same of this rank's part. `packed`: whether the call is told of documents."""
    q, k, v, dout, sink = problem.tensors()
    more = {"cu_seqlens": ends} if packed else {}
    mine = [shard(t, layout, me.rank, me.size, **more) for t in (q, k, v, dout)]
    leaves = [t.requires_grad_() for t in (*mine[:3], *[sink] * problem.sink)]
    options |= {**more, "layout": layout, "causal": True, "group": me.group, "return_lse": True}
    with poison():
        out, lse = (function or ringx_attention)(
            *leaves[:3], sink=sink if problem.sink else None, **options
        )
        grads = torch.autograd.grad(out, leaves, mine[3])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False))


def joined(parts: list[dict[str, torch.Tensor]], layout: str, **more: Any) -> dict[str, Any]:
    whole = {}
    for name in parts[0]:
        each = [part[name].double() for part in parts]
        if name == "dsink":
            whole[name] = torch.stack(each).sum(0)
        else:
            whole[name] = unshard(each, layout, 2 if name == "lse" else 1, **more)
    return whole


def check(
    world: World, members: tuple[int, ...], problem: Problem, ends: Any, limit: float = EXACT,
    function: Any = attend, **options: Any,
) -> None:  # fmt: skip
    parts = world.run(members, function, problem, ends, **options)
    worst = errors(joined(parts, "zigzag", cu_seqlens=ends), masked(problem, [*map(int, ends)]))
    assert max(worst.values()) <= limit, worst


def packing(size: int, *chunks: int) -> list[int]:
    """Where documents of so many chunks' lengths end."""
    return [2 * size * sum(chunks[:count]) for count in range(len(chunks) + 1)]


def sized(ends: list[int], **options: Any) -> Problem:
    return Problem(rows=ends[-1], keys=ends[-1], **options)


@pytest.mark.parametrize("members", [(0,), *RANKS], ids=str)
@pytest.mark.parametrize(
    "chunks", [(3,), (1,) * 9, (1, 5, 2), (2, 0, 3)], ids=["one", "short", "mixed", "empty"]
)
def test_is_the_unsplit_model(world: World, members: tuple[int, ...], chunks: tuple[int, ...]):
    ends = packing(len(members), *chunks)
    check(world, members, sized(ends, heads=4, kv_heads=2), ends)


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda x: torch.tensor(x).int()])
def test_batch_sink_and_kinds_of_lengths(world: World, kind: Any):
    ends = packing(3, 2, 1, 3)
    problem = sized(ends, batch=2, heads=5, kv_heads=1, dim=7, sink=True)
    check(world, (1, 2, 3), problem, kind(ends), agreed=True, algorithm="X3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_types(world: World, dtype: torch.dtype):
    ends = packing(2, 2, 1, 3)
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    check(world, (2, 3), sized(ends, heads=4, kv_heads=2, dim=16, dtype=dtype), ends, limit)


def compiled(me: Rank, *args: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    fast = torch.compile(ringx_attention, fullgraph=True, backend="aot_eager")
    return attend(me, *args, function=fast, **options)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_compiled(world: World, kind: Any):
    ends = packing(2, 2, 1, 3)
    problem = sized(ends, heads=4, kv_heads=2, sink=True)
    check(world, (2, 3), problem, kind(ends), function=compiled)


def graphs(me: Rank) -> int:
    """How many are made for four packings."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast = torch.compile(ringx_attention, fullgraph=True, backend="aot_eager")
    for chunks in (1, 2), (2, 1, 1), (1, 1, 1, 1), (3, 1, 1, 1, 1):
        ends = torch.tensor(packing(me.size, *chunks))
        attend(me, sized(ends.tolist()), ends, function=fast)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_no_graph_for_each_packing(world: World):
    assert max(world.run((0, 1), graphs)) <= 2


def in_a_model(me: Rank, *args: Any, **options: Any) -> Any:
    """Computed again in backward, in a context in which products are in bfloat16."""

    def function(*tensors: Any, **how: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(ringx_attention, *tensors, use_reentrant=False, **how)

    return attend(me, *args, function=function, **options)


def test_checkpointed_under_autocast(world: World):
    ends = packing(2, 2, 1, 3)
    check(world, (2, 3), sized(ends, heads=4, kv_heads=2), ends, function=in_a_model)


def test_positions_start_again_in_each_document():
    ends = [0, 4, 12, 12, 16]
    zigzag = {"layout": "zigzag", "size": 2, "cu_seqlens": ends}
    assert positions(16, rank=0, **zigzag).tolist() == [0, 3, 0, 1, 6, 7, 0, 3]
    assert positions(16, rank=1, **zigzag).tolist() == [1, 2, 2, 3, 4, 5, 1, 2]
    contiguous = {**zigzag, "layout": "contiguous"}
    assert positions(16, rank=0, **contiguous).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert positions(16, rank=1, **contiguous).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    tokens = torch.arange(16)
    for options in zigzag, contiguous:
        parts = [shard(tokens, rank=rank, dim=0, **options) for rank in range(2)]
        assert torch.equal(unshard(parts, options["layout"], 0, cu_seqlens=ends), tokens)
    assert shard(tokens, "zigzag", 0, 2, 0, cu_seqlens=ends).tolist() == [
        0,
        3,
        4,
        5,
        10,
        11,
        12,
        15,
    ]


def of_group(me: Rank) -> bool:
    ends, tokens = torch.tensor(packing(3, 1, 2)), torch.arange(18)
    options = {"group": me.group, "cu_seqlens": ends}
    mine = shard(tokens, "zigzag", dim=0, **options)
    same = torch.equal(positions(18, "zigzag", **options), torch.where(mine < 6, mine, mine - 6))
    return same and torch.equal(unshard(mine, "zigzag", 0, **options), tokens)


def test_layouts_of_a_group(world: World):
    assert world.run((1, 2, 3), of_group) == [True] * 3


X = torch.ones(1, 6, 2, 8)
REFUSED = [
    (
        {"cu_seqlens": [0, 8, 12]},
        "ShapeError: ringx: length 4 of document 1: want a multiple of 8 for layout zigzag over 4 "
        "ranks (pad it by 4)",
    ),
    ({"cu_seqlens": [0, 16]}, "ShapeError: ringx: cu_seqlens ends at 16, but the ranks have 24 to"),
    (
        {"cu_seqlens": [0, 16], "agreed": True},
        "cu_seqlens ends at 16, but the ranks have 24 tokens",
    ),
    ({"cu_seqlens": [8, 24]}, "ShapeError: ringx: cu_seqlens (8, 24): want cumulative lengths"),
    (
        {"cu_seqlens": [0, 16, 8, 24]},
        "cu_seqlens (0, 16, 8, 24): want cumulative lengths, with 0 f",
    ),
    ({"cu_seqlens": []}, "ShapeError: ringx: cu_seqlens (): want cumulative lengths"),
    ({"cu_seqlens": 24}, "ConfigError: ringx: cu_seqlens 24 of type int: want whole numbers"),
    ({"cu_seqlens": [0.0, 24.0]}, "ConfigError: ringx: cu_seqlens [0.0, 24.0] of type list: want"),
    ({"cu_seqlens": torch.tensor(24)}, "cu_seqlens tensor(24) of type Tensor: want whole numbers"),
    ({"cu_seqlens": torch.tensor([[0, 24]])}, "of type Tensor: want whole numbers, in a sequence"),
    ({"cu_seqlens": torch.ones(2)}, "cu_seqlens tensor([1., 1.]) of type Tensor: want whole"),
    (
        {"cu_seqlens": torch.ones(2).int().to("meta")},
        "want whole numbers, in a sequence or in a tensor on the CPU",
    ),
    ({"cu_seqlens": [0, 24], "causal": False}, "cu_seqlens with algorithm auto and causal=False"),
    (
        {"cu_seqlens": [0, 24], "algorithm": "X4"},
        "algorithm X4 and causal=True: want auto or X3, an",
    ),
    ({"cu_seqlens": [0, 24], "layout": "contiguous"}, "algorithm auto, which needs zigzag parts"),
    ({"window": 0}, "ConfigError: ringx: window 0 of type int: want a whole number, 1 or more"),
    ({"window": -1}, "ConfigError: ringx: window -1 of type int: want a whole number, 1 or more"),
    (
        {"window": True},
        "ConfigError: ringx: window True of type bool: want a whole number, 1 or more",
    ),
    (
        {"window": (4, 0)},
        "ConfigError: ringx: window (4, 0) of type tuple: want a whole number, 1 or more",
    ),
    (
        {"window": 4, "causal": False},
        "window 4 with algorithm auto and causal=False: want auto and",
    ),
    (
        {"window": 4, "algorithm": "X2"},
        "window 4 with algorithm X2 and causal=True: want auto and ",
    ),
    (
        {"window": 4, "layout": "zigzag"},
        "ConfigError: ringx: layout zigzag with algorithm auto, window=4, which needs contiguous "
        "parts (shard by layout_of('auto', True, window=4))",
    ),
    ({"window": 4, "cu_seqlens": [0, 5]}, "cu_seqlens ends at 5, but the ranks have 24 tokens"),
]


def refused(me: Rank, number: int, only: int | None = None) -> str:
    """What a call raises whose arguments are wrong, on all ranks or on one."""
    call = REFUSED[number][0] if only in (None, me.rank) else {"agreed": False}
    call = {"causal": True, "group": me.group, **call}
    if only is not None:
        call["agreed"] = False
    try:
        ringx_attention(X, X, X, **call)
    except (ConfigError, ShapeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda at: str(REFUSED[at][0]))
def test_wrong_arguments(world: World, number: int):
    """On all ranks; and on one alone: there is an error on all, before anything travels."""
    for text in world.run((0, 1, 2, 3), refused, number):
        assert REFUSED[number][1] in text
    alone = world.run((0, 1, 2, 3), refused, number, 2)
    if "but the ranks have" in REFUSED[number][1]:  # no rank can know that by itself
        assert {("is None on rank 0 and" in text) for text in alone} == {True}, alone
        return
    assert REFUSED[number][1] in alone[2]
    for rank in (0, 1, 3):
        assert "rank 2 of the group has refused its own arguments" in alone[rank]


DIFFERENT = [
    (
        {"cu_seqlens": [0, 12]},
        {"cu_seqlens": [0, 4, 12]},
        "ConfigError: ringx: cu_seqlens is of di",
    ),
    ({}, {"cu_seqlens": [0, 12]}, "ConfigError: ringx: cu_seqlens is None on rank 0 and of digest"),
    ({"window": 3}, {"window": 4}, "ConfigError: ringx: window is 3 on rank 0 and 4 on rank 1 of"),
    ({}, {"window": 4}, "ConfigError: ringx: window is None on rank 0 and 4 on rank 1 of the gro"),
]


def differing(me: Rank, number: int) -> str:
    with pytest.raises(ConfigError) as error:
        ringx_attention(X, X, X, causal=True, group=me.group, **DIFFERENT[number][me.rank])
    return f"ConfigError: {error.value}"


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_what_differs_is_an_error_on_all(world: World, number: int):
    for text in world.run((0, 1), differing, number):
        assert DIFFERENT[number][2] in text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: positions(16, "zigzag", 0, 2, cu_seqlens=[0, 8]),
            "cu_seqlens ends at 8: want the",
        ),
        (
            lambda: shard(X, "zigzag", 0, 2, cu_seqlens=[0, 2, 6]),
            "length 2 of document 0: want a m",
        ),
        (lambda: unshard([X, X], "zigzag", cu_seqlens=[0, 4]), "ends at 4: want the length, 12"),
    ],
)
def test_layouts_refuse(call: Any, text: str):
    with pytest.raises(ShapeError) as error:
        call()
    assert text in str(error.value)


def captured(me: Rank) -> str:
    """A capture would keep the documents of its call."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
        patch.setattr(arguments, "capturing", lambda device: True)
        ringx_attention(X, X, X, causal=True, group=me.group, agreed=True, cu_seqlens=[0, 12])
    return str(error.value)


def test_no_capture(world: World):
    for text in world.run((0, 1), captured):
        assert "cu_seqlens in the capture of a CUDA graph: a graph would keep these" in text


def test_sixteen_packings_are_kept(monkeypatch: pytest.MonkeyPatch):
    """A packing is the ends of the rows and of the keys of three calls, of which four differ."""
    uploads = 0

    def counted(numbers: list[int], device: torch.device) -> torch.Tensor:
        nonlocal uploads
        uploads += 1
        return torch.tensor(numbers)

    monkeypatch.setattr(kernels, "on_device", counted)
    cpu = torch.device("cpu")
    kernels._uploaded.cache_clear()
    for _ in range(2):
        for last in range(16):
            for first in range(4):
                kernels._ends((0, 1 + first, 20 + last), 1, 20 + last, cpu, 0)
    assert uploads == 64
    kernels._uploaded.cache_clear()


def test_own_keys_need_no_index():
    """One would keep alive the numbers of all keys."""
    own, *others = exchanges._documents_planned((0, 8, 24), 1, 2, torch.device("cpu"), 0)
    assert own.keys == [slice(12, 24)]
    for call in others:
        assert call.keys.untyped_storage().nbytes() == call.keys.nbytes
