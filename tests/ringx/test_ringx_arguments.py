"""What is refused, and how; layouts; the functions of the reference."""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import ROWS, Problem
from torch.nn.attention import SDPBackend, sdpa_kernel
from world import Rank, World

import fserver.ringx
from fserver.errors import ConfigError, Error, ShapeError
from fserver.ringx import (
    algorithms,
    arguments,
    kernels,
    layout_of,
    positions,
    ringx_attention,
    shard,
    unshard,
)
from fserver.ringx import reference as functions
from fserver.ringx.algorithms import ALGORITHMS
from fserver.ringx.ranks import ranks_of

FUNCTIONS = {f"X{name}": f"ringX{name}_attn_func" for name in "1 1o 2 2o 3 3b 4 4o".split()}


def refused(
    me: Rank, calls: list[dict[str, Any]], only: int | None = None, first: bool = True
) -> list[str]:
    """What each call raises, as type and text. `only` that rank makes the change, if one is. Each
    is a `first` call, which the ranks compare."""
    found = []
    for call in calls:
        if first:
            ranks_of(me.group).kept.agreed.clear()
        call = dict(call)
        function = getattr(fserver.ringx, call.pop("function", "ringx_attention"))
        shapes = {"q": (1, 4, 2, 8), "k": (1, 4, 2, 8), "dtype": torch.float32}
        options: dict[str, Any] = {"group": me.group}
        if function is ringx_attention:
            options |= {"causal": True, "algorithm": "X3"}
        elif only is not None:
            options["causal"] = True
        if only is None or me.rank == only:
            shapes |= {name: call.pop(name) for name in [*shapes] if name in call}
            options |= call
        tensors = {name: torch.ones(shapes[name]).to(shapes["dtype"]) for name in ("q", "k")}
        v_dtype = options.pop("v_dtype", shapes["dtype"])
        tensors["v"] = torch.ones(options.pop("v", shapes["k"])).to(v_dtype)
        tensors |= options.pop("given", {})
        try:
            function(**{**tensors, **options})
        except Error as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
    return found


REFUSED = [
    ({"agreed": True, "q": (1, 4, 0, 8)}, "ShapeError: ringx: q.shape (1, 4, 0, 8), k.shape"),
    (
        {"algorithm": "X9"},
        "ConfigError: ringx: algorithm 'X9' of type str: want auto or one of ['X1'",
    ),
    ({"algorithm": "X1"}, "causal=True: its mask is full (use causal=False, or one of ['X2'"),
    ({"causal": False}, "algorithm X3 with causal=False: its mask is causal (use causal=True"),
    ({"q": (1, 5, 2, 8), "k": (1, 5, 2, 8)}, "ShapeError: ringx: q.shape[1] is 5, but zigzag"),
    ({"algorithm": "auto", "q": (1, 3, 2, 8), "k": (1, 3, 2, 8)}, "zigzag needs two chunks"),
    (
        {"q": (1, 4, 3, 8)},
        "(1, 4, 3, 8), k.shape (1, 4, 2, 8), v.shape (1, 4, 2, 8): want a multiple of k's heads",
    ),
    (
        {"q": (1, 4, 2, 8), "k": (1, 6, 2, 8)},
        "(1, 6, 2, 8): want equal lengths with causal=True, or causal=False",
    ),
    ({"q": (4, 2, 8)}, "ShapeError: ringx: q.shape (4, 2, 8): want [B, S, H, D]"),
    (
        {"q": (2, 4, 2, 8)},
        "q.shape (2, 4, 2, 8), k.shape (1, 4, 2, 8), v.shape (1, 4, 2, 8): want one batch size",
    ),
    ({"v": (1, 4, 1, 8)}, "k.shape (1, 4, 2, 8), v.shape (1, 4, 1, 8): want k.shape for v"),
    ({"v_dtype": torch.float64}, "ConfigError: ringx: v is torch.float64 on cpu, but q is torch"),
    ({"dtype": torch.int32}, "ConfigError: ringx: q.dtype torch.int32 of type dtype: want one of"),
    ({"reduce_dtype": torch.int32}, "reduce_dtype torch.int32 of type dtype: want one of"),
    ({"sink": torch.ones(3)}, "sink has shape (3,) and is torch.float32 on cpu: want shape (2,)"),
    ({"q": (1, 4, 0, 8)}, "empty"),
    (
        {"algorithm": "X1", "causal": False, "k": (1, 0, 2, 8)},
        "ShapeError: ringx: k.shape[1] is 0 on all ranks",
    ),
    (
        {"function": "ringX3_attn_func", "causal": True, "dropout_p": 0.1},
        "ConfigError: ringx: dropout_p 0.1 of type float: want 0.0 (others are not supported: "
        "kernels draw by the place in a block, so ranks would not drop what the unsplit model dr",
    ),
    (
        {"function": "ringX3_attn_func", "causal": True, "window_size": (8, 0)},
        "ConfigError: ringx: window_size (8, 0) of type tuple: want (-1, -1) (others are n",
    ),
    (
        {"function": "ringX3_attn_func", "causal": True, "alibi_slopes": torch.ones(2)},
        "ConfigError: ringx: alibi_slopes tensor([1., 1.]) of type Tensor: want None (others are n",
    ),
    ({"function": "ringX2_attn_func"}, "X2 with causal=False: its mask is causal"),
    ({"function": "ringX3b_attn_func", "causal": True}, "X3b with causal=True: its mask is full"),
    (
        {"algorithm": "X1", "causal": False, "copies": True},
        "copies True with algorithm X1, which cannot use copies (use one of ['X3', 'X3b', 'X4']",
    ),
    ({"algorithm": "X4o", "copies": True}, "copies True with algorithm X4o, which cannot use"),
    (
        {"layout": "contiguous"},
        "ConfigError: ringx: layout contiguous with algorithm X3, which needs zigzag parts (shard "
        "by layout_of('X3', True), or use one of ['X2', 'X2o', 'ulysses'])",
    ),
    ({"layout": "contiguous", "agreed": True}, "ConfigError: ringx: layout contiguous with algo"),
    (
        {"algorithm": "auto", "layout": "contiguous"},
        "with algorithm auto, which needs zigzag parts",
    ),
    (
        {"algorithm": "X2", "layout": "zigzag"},
        "layout zigzag with algorithm X2, which needs contiguous parts (shard by "
        "layout_of('X2', True), or use one of ['X3', 'X4', 'X4o', 'ring'])",
    ),
    (
        {"algorithm": "X1", "causal": False, "layout": "zigzag"},
        "ConfigError: ringx: layout zigzag with algorithm X1, which needs contiguous parts (shard "
        "by layout_of('X1', False))",
    ),
    (
        {"algorithm": "ulysses", "q": (1, 4, 3, 8), "k": (1, 4, 1, 8)},
        "ConfigError: ringx: q has 3 heads, and algorithm ulysses divides them over 2 ranks: want "
        "a multiple of 2 (or use one of ['X2', 'X2o'])",
    ),
    ({"algorithm": "ring", "layout": "contiguous"}, "ring, which needs zigzag parts (shard by lay"),
    (
        {"layout": "striped"},
        "ConfigError: ringx: layout 'striped' of type str: want one of ('contig",
    ),
]


def test_refuses_what_it_cannot_do(world: World):
    answers = world.run((0, 1), refused, [call for call, _ in REFUSED])
    for found in answers:
        for (call, want), text in zip(REFUSED, found, strict=True):
            assert want in text, call


def test_one_rank_that_is_wrong_is_an_error_on_all(world: World):
    calls = [{"q": (1, 5, 2, 8), "k": (1, 5, 2, 8)}, {"dtype": torch.int32}]
    calls.append({"layout": "contiguous"})
    answers = world.run((1, 2, 3), refused, calls, only=1)
    for rank, found in enumerate(answers):
        for text, own in zip(found, answers[1], strict=True):
            want = "Error: ringx: rank 1 of the group has refused its own arguments: "
            assert rank == 1 or text.replace(want, "Error: ringx: ") == own, found
    assert "zigzag" in answers[1][0]
    assert "q.dtype" in answers[1][1]
    assert "layout contiguous with algorithm X3" in answers[1][2]


class Trap:
    """Not to be looked at."""

    def __eq__(self, other: object) -> bool:
        raise KeyError("trap")

    __hash__ = None


X = torch.ones(1, 4, 2, 8)
POSITIVE = (
    "want a positive number from 1.17549e-38 to 3.40282e+38 (a negative one: negate q; a tensor: "
    "multiply q by it)"
)
REFERENCE = {"function": "ringX3_attn_func", "causal": True}
ODD = [
    *(
        ({"scale": value, **mask}, f"ConfigError: ringx: scale {text}: {POSITIVE}")
        for mask in ({}, {"algorithm": "auto", "causal": False})
        for value, text in (
            (0, "0 of type int"),
            (-0.3, "-0.3 of type float"),
            (1e-46, "1e-46 of type float"),
            (float("nan"), "nan of type float"),
            (float("inf"), "inf of type float"),
            (10**400, "100000000000000000...0000000000000000000 of type int"),
            ("a", "'a' of type str"),
            (True, "True of type bool"),
            (torch.tensor(0.3), "tensor(0.3000) of type Tensor"),
        )
    ),
    *(
        ({"causal": value, "algorithm": name}, f"ConfigError: ringx: causal {text}: want True or F")
        for name in ("auto", "X3")
        for value, text in (
            (None, "None of type NoneType"),
            (2, "2 of type int"),
            ("yes", "'yes' of type str"),
            (torch.tensor([True, False]), "tensor([ True, False]) of type Tensor"),
        )
    ),
    ({"given": {"q": None}}, "ConfigError: ringx: q None of type NoneType: want a torch.Tensor"),
    ({"given": {"k": [[1.0]]}}, "ConfigError: ringx: k [[1.0]] of type list: want a torch.Tensor"),
    ({"given": {"v": X.numpy()}}, "of type ndarray: want a torch.Tensor"),
    ({"given": {"q": X.to_sparse()}}, "ConfigError: ringx: q is torch.sparse_coo: want a dense"),
    (
        {"given": {"q": "nested"}},
        "ConfigError: ringx: q is nested: want a dense tensor (use to_padded_tensor, to_local or",
    ),
    (
        {"given": dict.fromkeys("qkv", X.to("meta"))},
        "ConfigError: ringx: q is on meta, for which the group has no backend: want a tensor on",
    ),
    ({"sink": [1.0, 2.0]}, "ConfigError: ringx: sink [1.0, 2.0] of type list: want a torch.Tensor"),
    ({"sink": torch.ones(2).to_sparse()}, "ConfigError: ringx: sink is torch.sparse_coo: want a"),
    ({"algorithm": ["X3"]}, "ConfigError: ringx: algorithm ['X3'] of type list: want auto or"),
    (
        {"layout": ["zigzag"]},
        "ConfigError: ringx: layout ['zigzag'] of type list: want one of ('con",
    ),
    ({"algorithm": None}, "ConfigError: ringx: algorithm None of type NoneType: want auto or"),
    (
        {"reduce_dtype": "float32"},
        "ConfigError: ringx: reduce_dtype 'float32' of type str: want one",
    ),
    ({"agreed": "no"}, "ConfigError: ringx: agreed 'no' of type str: want True or False"),
    ({"copies": torch.ones(2)}, "of type Tensor: want True or False"),
    ({"return_lse": None}, "ConfigError: ringx: return_lse None of type NoneType: want True or"),
    (
        {**REFERENCE, "window_size": None},
        "ConfigError: ringx: window_size None of type NoneType: want (-",
    ),
    (
        {**REFERENCE, "window_size": -1},
        "ConfigError: ringx: window_size -1 of type int: want (-1, -",
    ),
    (
        {**REFERENCE, "dropout_p": "a"},
        "ConfigError: ringx: dropout_p 'a' of type str: want 0.0 (othe",
    ),
    (
        {**REFERENCE, "softmax_scale": -1.0},
        f"ConfigError: ringx: scale -1.0 of type float: {POSITIVE}",
    ),
    ({**REFERENCE, "deterministic": None}, "deterministic None of type NoneType: want True or"),
    (
        {**REFERENCE, "window_size": (Trap(), 0)},
        "ConfigError: ringx: the arguments cannot be checked: KeyError('trap') (see its cause)",
    ),
]
"""Values of types that no argument has, and scales."""


def odd(me: Rank, number: int) -> list[str]:
    call, _ = ODD[number]  # here, as not all of it can be sent
    if call.get("given") == {"q": "nested"}:
        call = {"given": {"q": torch.nested.nested_tensor([torch.ones(4, 2, 8)])}}
    return refused(me, [call], only=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(ODD)), ids=lambda number: str(ODD[number][1])[:60])
def test_any_value_on_one_rank_is_an_error_on_all(world: World, number: int):
    answers = [answer for (answer,) in world.run((0, 1), odd, number)]
    assert ODD[number][1] in answers[1]
    assert answers[0] == answers[1].replace(
        "ringx: ", "ringx: rank 1 of the group has refused its own arguments: ", 1
    )


def cause(me: Rank) -> str:
    with pytest.raises(ConfigError) as error:
        fserver.ringx.ringX3_attn_func(X, X, X, 0.0, None, True, (Trap(), 0), group=me.group)
    return repr(error.value.__cause__)


def test_what_cannot_be_checked_has_its_cause(world: World):
    assert world.run((0,), cause) == ["KeyError('trap')"]


def wrong_groups(me: Rank) -> list[str]:
    found = []
    for group in (3, "world", torch.ones(2), dist.ProcessGroup(0, 1)):
        with pytest.raises(ConfigError) as error:
            ringx_attention(X, X, X, causal=True, group=group)
        found.append(str(error.value))
    return found


def test_what_is_no_group(world: World):
    three, name, tensor, gone = world.run((0,), wrong_groups)[0]
    assert three == (
        "ringx: group 3 of type int: want a group from new_group, a DeviceMesh with one "
        "dimension, or None for all ranks"
    )
    assert "group 'world' of type str: want" in name
    assert "of type Tensor: want" in tensor
    assert "of type ProcessGroup: " in gone and "(make a new group)" in gone


def without_kernel(me: Rank, only: int | None) -> str:
    """No kernel for tensors on a CPU is enabled."""
    restricted = only is None or me.rank == only
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if restricted else nullcontext():
        return refused(me, [{}])[0]


def test_no_kernel_on_one_rank_is_an_error_on_all(world: World):
    want = "ConfigError: ringx: no attention kernel for q.dtype torch.float32, head dimension 8 on"
    first, second = world.run((0, 1), without_kernel, 1)
    assert want in second
    assert "rank 1 of the group has refused its own arguments" in first
    assert all(want in text for text in world.run((0, 1), without_kernel, None))


class OnGpu(torch.Tensor):
    """Says so."""

    is_cuda = property(lambda self: True)


def deterministic(me: Rank) -> str:
    q = X.as_subclass(OnGpu) if me.rank else X
    return refused(me, [{**REFERENCE, "deterministic": True, "given": {"q": q}}])[0]


def test_deterministic(world: World):
    """On a GPU torch decides; on a CPU all is."""
    first, second = world.run((0, 1), deterministic)
    assert "rank 1 of the group has refused its own arguments" in first
    assert (
        "deterministic True of type bool: want False (torch decides which kernels it uses: call "
        in second
    )
    arguments = X.as_subclass(OnGpu), 0.0, (-1, -1), None, True, False
    with pytest.raises(ConfigError, match="torch decides"):
        functions._check_reference(*arguments)
    torch.use_deterministic_algorithms(True)
    try:
        functions._check_reference(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert refused_nothing(world, [{**REFERENCE, "deterministic": True}])


def refused_nothing(world: World, calls: list[dict[str, Any]]) -> bool:
    return world.run((0, 1), refused, calls) == [["nothing"] * len(calls)] * 2


def test_copies_fall_back_where_they_are_no_use(world: World):
    """To collectives: on a CPU, and where auto takes X1o."""
    auto = {"algorithm": "auto", "causal": False, "copies": True}
    few = {"q": (1, 1, 2, 8), "k": (1, 64, 2, 8)}
    assert refused_nothing(world, [{"copies": True}, auto, {**auto, **few}])


DIFFERENT = [
    ({"q": (1, 6, 2, 8), "k": (1, 6, 2, 8)}, "ShapeError: ringx: q.shape[1] is 4 on rank 0 and 6 "),
    ({"q": (2, 4, 2, 8), "k": (2, 4, 2, 8)}, "ShapeError: ringx: q.shape[0] is 1 on rank 0 and 2 "),
    ({"q": (1, 4, 4, 8)}, "q.shape[2] is 2 on rank 0 and 4 on rank 1 of the group: want the same"),
    ({"k": (1, 4, 1, 8)}, "k.shape[2] is 2 on rank 0 and 1 "),
    ({"algorithm": "X4"}, "ConfigError: ringx: algorithm is X3 on rank 0 and X4 "),
    ({"reduce_dtype": torch.float16}, "reduce_dtype is torch.float32 on rank 0 and torch.float16 "),
    ({"scale": 0.5}, "scale is 0.3535533905932738 on rank 0 and 0.5 on rank 1"),
    ({"dtype": torch.float64}, "q.dtype is torch.float32 on rank 0 and torch.float64 "),
    ({"sink": torch.ones(2)}, "sink is None on rank 0 and a tensor "),
    ({"copies": True}, "ConfigError: ringx: copies is False on rank 0 and True "),
    # The default scale follows from the head dimension, which is what differs.
    (
        {"q": (1, 4, 2, 16), "k": (1, 4, 2, 16)},
        "ShapeError: ringx: q.shape[3] is 8 on rank 0 and 16",
    ),
    *(
        (
            {"given": {name: value}, **options},
            "ConfigError: ringx: requires_grad (of q, k, v or sink, in grad mode) is False on rank "
            "0 and True on rank 1 of the group: want the same on all ranks",
        )
        for name, value, options in (
            ("q", X.clone().requires_grad_(), {}),
            ("v", X.clone().requires_grad_(), {"algorithm": "X3"}),
        )
    ),
]


def modes(me: Rank) -> list[str]:
    """Rank 1 does not compute gradients of what requires them."""
    said = []
    leaf = {"given": {"k": X.clone().requires_grad_()}}
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode() if me.rank == 1 else nullcontext():
            said += refused(me, [leaf])
    return said


def test_grad_mode_that_differs_is_an_error_on_all(world: World):
    """A backward on some of the ranks would wait for the others."""
    for same, no_grad, inference in world.run((0, 1, 2), modes):
        assert same == "nothing"
        assert no_grad == inference
        assert "in grad mode) is True on rank 0 and False on rank 1 of the group" in no_grad


def test_what_differs_is_an_error_on_all(world: World):
    for found in world.run((1, 2, 3), refused, [call for call, _ in DIFFERENT], only=1):
        for (call, want), text in zip(DIFFERENT, found, strict=True):
            assert want in text, call


def test_without_a_group():
    x = torch.ones(1, 4, 2, 8)
    with pytest.raises(ConfigError, match="init_process_group"):
        ringx_attention(x, x, x, causal=True)


def outside(me: Rank) -> str:
    """Rank 0 of the world calls for a group of which it is not."""
    group = dist.new_group([1, 2, 3])
    x = torch.ones(1, 4, 2, 8)
    if dist.get_rank():
        return ""
    with pytest.raises(ConfigError) as error:
        ringx_attention(x, x, x, causal=True, group=group)
    return str(error.value)


def test_outside_of_the_group(world: World):
    assert "not a member" in world.run((0, 1, 2, 3), outside)[0]


def of_lse(me: Rank) -> tuple[str, str]:
    q, k, v = (t.requires_grad_() for t in Problem().tensors()[:3])
    out, lse = ringx_attention(
        q, k, v, causal=True, algorithm="X3", group=me.group, return_lse=True
    )
    texts = []
    with pytest.raises(Error) as error:
        (out.sum() + lse.sum()).backward(retain_graph=True)
    texts.append(str(error.value))
    with pytest.raises(Error) as error:
        torch.autograd.grad(out.sum(), q, create_graph=True)
    texts.append(str(error.value))
    return texts[0], texts[1]


def test_gradients_that_there_are_not_are_an_error(world: World):
    through_lse, twice = world.run((0,), of_lse)[0]
    assert "lse.detach()" in through_lse
    assert "no second derivative" in twice


def test_signatures():
    parameters = inspect.signature(ringx_attention).parameters
    names = "q k v algorithm causal layout scale group sink reduce_dtype return_lse agreed copies"
    names += " cu_seqlens window"
    assert [*parameters] == names.split()
    assert parameters["causal"].default is inspect.Parameter.empty
    for name in FUNCTIONS.values():
        function = getattr(fserver.ringx, name)
        assert function.__name__ == name
        assert {p.name: p.default for p in inspect.signature(function).parameters.values()} == {
            **dict.fromkeys("qkv", inspect.Parameter.empty),
            **{"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1)},
            **{"alibi_slopes": None, "deterministic": False, "return_attn_probs": False},
            "group": None,
        }


def alike(me: Rank, algorithm: str, function: str) -> bool:
    how = ROWS[algorithm]
    mine = positions(24, how.layout, me.rank, me.size)
    q, k, v = (t[:, mine] for t in Problem().tensors()[:3])
    options = {"causal": how.causal, "group": me.group}
    want = ringx_attention(q, k, v, algorithm=algorithm, scale=0.3, return_lse=True, **options)
    out, lse, nothing = getattr(fserver.ringx, function)(
        q, k, v, softmax_scale=0.3, return_attn_probs=True, **options
    )
    return torch.equal(out, want[0]) and torch.equal(lse, want[1]) and nothing is None


@pytest.mark.parametrize("algorithm", [*FUNCTIONS])
def test_functions_of_the_reference(world: World, algorithm: str):
    assert all(world.run((2, 3), alike, algorithm, FUNCTIONS[algorithm]))


LIMIT = algorithms.GATHER_LIMIT


@pytest.mark.parametrize(
    ("causal", "tokens", "ranks", "more", "want"),
    [
        (True, 4096, 2, {}, "ring"),
        (True, 8192, 2, {}, "ring"),
        (True, 16384, 2, {}, "X3"),
        (True, 8192, 2, {"copies": True}, "X3"),
        (True, 8192, 2, {"direct": False}, "X3"),
        (True, 2048, 4, {}, "X3"),
        (True, 4096, 1, {}, "X3"),
        (True, 16384, 2, {"gathered": LIMIT}, "X3"),
        (True, 16384, 2, {"gathered": LIMIT + 1}, "X4"),
        (True, 4096, 2, {"gathered": LIMIT + 1}, "X4"),
        (False, 4096, 2, {}, "ring"),
        (False, 16384, 2, {}, "X3b"),
        (False, 4096, 2, {"copies": True}, "X3b"),
        (False, 4096, 4, {"gathered": LIMIT + 1}, "X3b"),
        (False, 4096, 2, {"queries": 9}, "X1o"),
        (False, 16384, 4, {"even": False}, "X1o"),
    ],
)
def test_auto(causal: bool, tokens: int, ranks: int, more: dict[str, Any], want: str):
    sizes = {"queries": 10, "keys": 10, "gathered": 0, **more}
    assert algorithms.automatic(causal, tokens, ranks, **sizes) == want
    how = algorithms.ALGORITHMS[want]
    assert how.layout(causal) == layout_of("auto", causal)


def automatic(me: Rank, causal: bool) -> Any:
    layout = "zigzag" if causal else "contiguous"
    mine = positions(24, layout, me.rank, me.size)
    q, k, v = (t[:, mine] for t in Problem().tensors()[:3])
    return ringx_attention(q, k, v, causal=causal, group=me.group)


def test_auto_is_exact(world: World):
    for causal, layout in ((True, "zigzag"), (False, "contiguous")):
        q, k, v = (t.transpose(1, 2) for t in Problem().tensors()[:3])
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        found = unshard(world.run((0, 1, 2), automatic, causal), layout)
        torch.testing.assert_close(found, want.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_layout_of():
    """It is what each algorithm works on, and what it accepts as layout=."""
    for name, causal, layout in ROWS.values():
        assert layout_of(name, causal) == layout
        if len(ALGORITHMS[name].masks) == 1:
            assert layout_of(name) == layout
    zigzag = [name for name, row in ROWS.items() if row.layout == "zigzag"]
    assert zigzag == ["X3", "X4", "X4o", "ring"]
    assert layout_of("auto", True) == layout_of("auto", causal=True) == "zigzag"
    assert layout_of("auto", False) == "contiguous"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("X9",), "ringx: algorithm 'X9' of type str: want auto or one of ['X1'"),
        ((3,), "ringx: algorithm 3 of type int: want auto or one of ['X1'"),
        (("auto",), "ringx: layout_of('auto') depends on the mask: want causal=True or"),
        (("ring",), "ringx: layout_of('ring') depends on the mask: want causal=True or"),
        (("auto", 1), "ringx: causal 1 of type int: want True or False"),
        (("X3", 1), "ringx: causal 1 of type int: want True or False"),
        (("X1", True), "ringx: algorithm X1 with causal=True: its mask is full (use causal=False"),
    ],
)
def test_layout_of_refuses(arguments: Any, text: str):
    with pytest.raises(ConfigError) as error:
        layout_of(*arguments)
    assert text in str(error.value)


def accepted(me: Rank, algorithm: str) -> bool:
    """The answer is the same with the layout and without it."""
    name, causal, layout = ROWS[algorithm] if algorithm else ("auto", True, "zigzag")
    q, k, v = (shard(t, layout, me.rank, me.size) for t in Problem().tensors()[:3])
    options = {"algorithm": name, "causal": causal, "group": me.group}
    want = ringx_attention(q, k, v, **options)
    return torch.equal(ringx_attention(q, k, v, layout=layout, **options), want)


@pytest.mark.parametrize("algorithm", [*ROWS, ""])
def test_layout_that_is_right(world: World, algorithm: str):
    assert all(world.run((0, 1), accepted, algorithm))


def test_default_device_of_a_program():
    with torch.device("meta"):
        assert positions(8, "zigzag", 0, 2).device.type == "cpu"
        assert kernels.on_device([1, 2], torch.device("cpu")).tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards_make_the_whole(layout: str, size: int):
    whole = torch.randn(2, 24, 3)
    parts = [shard(whole, layout, rank, size) for rank in range(size)]
    assert torch.equal(unshard(parts, layout), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, positions(24, layout, rank, size)])
    uneven = torch.arange(7)
    if layout == "contiguous":
        parts = [shard(uneven, layout, rank, size, dim=0) for rank in range(size)]
        assert torch.equal(unshard(parts, layout, dim=0), uneven)


def test_zigzag_positions():
    assert positions(12, "zigzag", 1, 3).tolist() == [2, 3, 8, 9]
    with pytest.raises(
        ShapeError, match="length 10: want a multiple of 6 for layout zigzag over 3"
    ):
        positions(10, "zigzag", 0, 3)
    with pytest.raises(ConfigError, match="layout 'striped'"):
        positions(12, "striped", 0, 3)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: positions(12, "zigzag", 3, 3), ConfigError, "rank 3 with size 3: want 0 to 2"),
        (
            lambda: positions(12, "zigzag", -1, 3),
            ConfigError,
            "rank -1 of type int: want a whole num",
        ),
        (lambda: positions(4, "zigzag", 0, 0), ConfigError, "size 0 of type int: want a whole num"),
        (lambda: positions(4.0, "zigzag", 0, 1), ConfigError, "length 4.0 of type float: want a "),
        (
            lambda: positions(-4, "contiguous", 0, 1),
            ConfigError,
            "length -4 of type int: want a who",
        ),
        (lambda: positions("4", "zigzag", 0, 1), ConfigError, "length '4' of type str: want a wh"),
        (
            lambda: positions(4, ["zigzag"], 0, 1),
            ConfigError,
            "layout ['zigzag'] of type list: want one of",
        ),
        (lambda: shard([1, 2], "zigzag", 0, 1), ConfigError, "x [1, 2] of type list: want a tor"),
        (
            lambda: shard(X, "zigzag", 0, 1, dim=9),
            ConfigError,
            "dim 9 of type int: want -4 to 3, as x.shape is (1, 4, 2, 8)",
        ),
        (lambda: shard(X, "zigzag", 0, 1, dim=-5), ConfigError, "dim -5 of type int: want a whole"),
        (lambda: unshard([], "zigzag"), ConfigError, "parts (): want one tensor for each rank"),
        (lambda: unshard([X, 3], "zigzag"), ConfigError, "parts[1] 3 of type int: want a torch.T"),
        (
            lambda: unshard([X[:, :1], X[:, 1:]], "contiguous"),
            ShapeError,
            "parts[0].shape (1, 1, 2, 8): want (1, 2, 2, 8) (the contiguous part of rank 0 of",
        ),
        (
            lambda: unshard([X[:, :1], X[:, 1:]], "zigzag"),
            ShapeError,
            "parts[0].shape (1, 1, 2, 8): want (1, 2, 2, 8) (the zigzag part of rank 0 of 2",
        ),
        (
            lambda: unshard([X, X[:, :, :1]], "contiguous"),
            ShapeError,
            "parts[1].shape (1, 4, 1, 8): want (1, 4, 2, 8)",
        ),
        (lambda: unshard([X[:, :3]], "zigzag"), ShapeError, "length 3: want a multiple of 2 for"),
    ],
)
def test_layouts_refuse(call: Any, kind: type[Error], text: str):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


def test_import_loads_no_engine():
    code = "import sys, fserver.ringx; sys.exit('fserver._C' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_choosing_a_kernel_copies_nothing(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a copy")

    q, k = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 8, 16)  # heads before the sequence
    monkeypatch.setattr(torch.Tensor, "repeat_interleave", refuse)
    assert kernels.choose(q, k, k, True) is kernels.CPU_FLASH


def captured(me: Rank) -> list[str]:
    """What a call says while the current stream of a GPU is captured."""
    ranks_of(me.group).kept.uneven = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "capturing", lambda device: True)
        said = refused(me, [{}, {"scale": -1.0}, {"agreed": True}, REFERENCE])
    refused(me, [{}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "capturing", lambda device: True)
        return said + refused(me, [{}], first=False)


def test_capture_without_agreed_is_an_error_before_anything_is_enqueued(world: World):
    """On each rank by itself: nothing can be exchanged in a capture, also not what is wrong."""
    for without, wrong, agreed, reference, known in world.run((0, 1), captured):
        assert without == (
            "ConfigError: ringx: agreed None in the capture of a CUDA graph: ranks cannot compare "
            "their arguments there (make the same call once before the capture, with agreed=None, "
            "or capture ringx_attention(agreed=True))"
        )
        assert wrong == reference == without
        assert agreed == known == "nothing"
