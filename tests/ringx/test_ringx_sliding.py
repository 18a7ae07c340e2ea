"""A sliding window against the unsplit model with an explicit mask, in float64."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exact import EXACT, Problem, errors, poison
from test_ringx_documents import NAMES, RANKS, attend, compiled, in_a_model, joined, masked
from test_ringx_timeouts import MEMBERS, attempt, group_of_three
from torch.utils._python_dispatch import TorchDispatchMode
from world import Rank, World

from fserver.errors import ConfigError
from fserver.ringx import kernels, layout_of, ringx_attention
from fserver.ringx.kernels import Given

ROWS = 24


def wrong(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """As errors, but dq and dk are zero where a row sees one key: there the error itself."""
    none = {name for name, right in want.items() if right.abs().max() < 1e-14}
    assert none <= {"dq", "dk"}
    more = {name: float(found[name].abs().nan_to_num(torch.inf).max()) for name in none}
    some = [{name: of[name] for name in of.keys() - none} for of in (found, want)]
    return {**errors(*some), **more}


def check(
    world: World,
    members: tuple[int, ...],
    problem: Problem,
    window: int,
    ends: list[int] | None = None,
    limit: float = EXACT,
    **options: Any,
) -> None:
    packed = ends is not None
    ends = ends or [0, problem.rows]
    parts = world.run(
        members, attend, problem, ends, "contiguous", window=window, packed=packed, **options
    )
    worst = wrong(joined(parts, "contiguous"), masked(problem, ends, window))
    assert max(worst.values()) <= limit, worst


@pytest.mark.parametrize("members", [(0,), *RANKS], ids=str)
@pytest.mark.parametrize("window", [1, 2, 5, 6, 7, 9, 13, 23, 24, 100])
def test_is_the_unsplit_model(world: World, members: tuple[int, ...], window: int):
    """Within a rank's part, over several, and over all."""
    check(world, members, Problem(rows=ROWS, keys=ROWS, heads=4, kv_heads=2), window)


@pytest.mark.parametrize("members", RANKS, ids=str)
@pytest.mark.parametrize("window", [1, 4, 9, 50])
@pytest.mark.parametrize(
    "ends", [[0, 24], [0, 1, 2, 7, 8, 12, 12, 24], [0, 0, 17, 24, 24]], ids=str
)
def test_with_packed_documents(
    world: World, members: tuple[int, ...], window: int, ends: list[int]
):
    """Of any length, also those that end where a rank's part does."""
    check(world, members, Problem(rows=ROWS, keys=ROWS, heads=4, kv_heads=2), window, ends)


def test_batch_sink_and_no_comparison(world: World):
    problem = Problem(batch=2, rows=ROWS, keys=ROWS, heads=5, kv_heads=1, dim=7, sink=True)
    check(world, (1, 2, 3), problem, 11, agreed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_types(world: World, dtype: torch.dtype):
    problem = Problem(rows=ROWS, keys=ROWS, heads=4, kv_heads=2, dim=16, dtype=dtype)
    limit = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    check(world, (1, 2, 3), problem, 11, limit=limit)


def few_rows(me: Rank, *args: Any, **options: Any) -> Any:
    """As attend, with blocks of three rows."""
    before, kernels.ROWS = kernels.ROWS, 3
    try:
        return attend(me, *args, **options)
    finally:
        kernels.ROWS = before


@pytest.mark.parametrize("window", [1, 2, 4, 9, 20])
def test_blocks_of_rows(world: World, window: int):
    problem = Problem(rows=ROWS, keys=ROWS, heads=4, kv_heads=2)
    ends = [0, 5, 24]
    parts = world.run((0, 1), few_rows, problem, ends, "contiguous", window=window)
    worst = wrong(joined(parts, "contiguous"), masked(problem, ends, window))
    assert max(worst.values()) <= EXACT, worst


def uneven(me: Rank, problem: Problem, lengths: tuple[int, ...], window: int) -> Any:
    stop = [*accumulate(lengths)][me.rank]
    rows = slice(stop - lengths[me.rank], stop)
    q, k, v, dout, _ = (t[:, rows] if t.dim() == 4 else t for t in problem.tensors())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with poison():
        out, lse = ringx_attention(
            *leaves, causal=True, window=window, group=me.group, return_lse=True
        )
        grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False))


@pytest.mark.parametrize("lengths", [(9, 0, 4), (1, 7, 5), (2, 2, 9), (5, 8, 0)], ids=str)
@pytest.mark.parametrize("window", [1, 6, 50])
def test_lengths_that_differ(world: World, lengths: tuple[int, ...], window: int):
    problem = Problem(rows=13, keys=13)
    parts = world.run((1, 2, 3), uneven, problem, lengths, window)
    found = {
        name: torch.cat([part[name] for part in parts], 2 if name == "lse" else 1)
        for name in parts[0]
    }
    worst = wrong(found, masked(problem, [0, 13], window))
    assert max(worst.values()) <= EXACT, worst


@pytest.mark.parametrize("function", [compiled, in_a_model])
def test_compiled_and_checkpointed(world: World, function: Any):
    problem, ends = Problem(rows=ROWS, keys=ROWS, heads=4, kv_heads=2), [0, 5, 24]
    parts = world.run((2, 3), function, problem, ends, "contiguous", window=11)
    worst = wrong(joined(parts, "contiguous"), masked(problem, ends, 11))
    assert max(worst.values()) <= EXACT, worst


def moved(
    me: Rank, window: int | None, ends: list[int], layout: str = "contiguous"
) -> dict[str, list[int]]:
    """Rows that this rank gets in each collective."""
    seen: dict[str, list[int]] = {}
    names = "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"

    def noting(name: str) -> Any:
        collective = getattr(dist, name)

        def noted(got: torch.Tensor, *args: Any, **options: Any) -> Any:
            seen.setdefault(name, []).append(got.shape[0])
            return collective(got, *args, **options)

        return noted

    problem = Problem(rows=ROWS, keys=ROWS)
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, noting(name))
        attend(me, problem, ends, layout, window=window, agreed=True)
    return seen


@pytest.mark.parametrize(
    ("window", "ends", "halos", "back"),
    [
        (1, [0, 24], (0, 0, 0, 0), (0, 0, 0, 0)),
        (4, [0, 24], (0, 3, 3, 3), (3, 3, 3, 0)),
        (9, [0, 24], (0, 6, 8, 8), (8, 8, 6, 0)),
        (99, [0, 24], (0, 6, 12, 18), (18, 12, 6, 0)),
        (9, [0, 6, 10, 24], (0, 0, 2, 8), (0, 4, 6, 0)),
    ],
)
def test_only_what_rows_see_travels(
    world: World, window: int, ends: list[int], halos: tuple[int, ...], back: tuple[int, ...]
):
    """Forward the halo, backward the halo and then the gradients of the keys that were lent."""
    found = world.run((0, 1, 2, 3), moved, window, ends)
    assert found == [
        {"all_to_all_single": [halo, halo, lent]} for halo, lent in zip(halos, back, strict=True)
    ]


def test_documents_travel_as_in_x3(world: World):
    """All keys are gathered twice, and their gradients are added up once."""
    for found in world.run((0, 1), moved, None, [0, 8, 24], "zigzag"):
        assert found == {"all_gather_into_tensor": [24, 24], "reduce_scatter_tensor": [12]}


def test_memory_is_that_of_a_block():
    """The largest tensor of a long sequence with a narrow window."""
    largest = 0

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            made = call(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return made

    rows, dim = 4096, 8
    q, k, v, out, dout = torch.randn(5, 1, rows, 1, dim, dtype=torch.float64)
    of_all = kernels.Segments((0, rows), (0, rows), True, 64)
    with Noting():
        _, lse = kernels.forward(q, k, v, of_all, 1.0)
        kernels.backward(Given(dout, q, k, v, out, lse), of_all, 1.0)
    assert largest == max(rows * dim, kernels.ROWS * (kernels.ROWS + 63))


def test_layout_of():
    assert layout_of("auto", True, window=8) == layout_of("auto", causal=True, window=8)
    assert layout_of("auto", True, window=8) == "contiguous"
    for arguments, text in (
        (("X3", True), "window 8 with algorithm X3 and causal=True: want auto and causal=True"),
        (("auto", None), "window 8 with algorithm auto and causal=None: want auto and causal=True"),
    ):
        with pytest.raises(ConfigError) as error:
            layout_of(*arguments, window=8)
        assert text in str(error.value)


class Flash:
    """flash attention's operators for variable lengths, by their documentation. Before they answer,
    torch checks the call against its schema, and what comes out, by meta tensors."""

    @staticmethod
    def _meta(name: str, args: Any, options: Any) -> Any:
        def there(x: Any) -> Any:
            return x.to("meta") if isinstance(x, torch.Tensor) else x

        call = getattr(torch.ops.aten, name)
        return call(*map(there, args), **{name: there(x) for name, x in options.items()})

    @staticmethod
    def _documents(q: Any, k: Any, ends: Any, longest: Any, causal: bool, window: int) -> Any:
        for (start, stop), (first, last) in zip(*(pairwise(e.tolist()) for e in ends), strict=True):
            assert stop - start <= longest[0] and last - first <= longest[1]
            row = torch.arange(stop - start)[:, None] + (last - first) - (stop - start)
            key = torch.arange(last - first)
            seen = torch.full((stop - start, last - first), True)
            seen &= (key <= row) if causal else seen
            seen &= (key >= row - window) if window >= 0 else seen
            yield slice(start, stop), slice(first, last), seen

    def _flash_attention_forward(
        self, q, k, v, of_q, of_k, most_q, most_k, p, causal, *rest, **more
    ):
        assert of_q.dtype == of_k.dtype == torch.int32 and p == 0
        args = (q, k, v, of_q, of_k, most_q, most_k, p, causal, *rest)
        out, lse, *_ = self._meta("_flash_attention_forward", args, more)
        assert out.shape == q.shape and lse.shape == (q.shape[1], q.shape[0])
        out, lse = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(lse.shape, dtype=torch.float64)
        window = more.get("window_size_left", -1)
        for rows, keys, seen in self._documents(
            q, k, (of_q, of_k), (most_q, most_k), causal, window
        ):
            some = (t[at][None] for t, at in ((q, rows), (k, keys), (v, keys)))
            got, level = kernels.forward(*some, seen, more["scale"])
            out[rows], lse[:, rows] = got[0], level[0]
        return out, lse, None, None, None

    def _flash_attention_backward(
        self, dout, q, k, v, out, lse, of_q, of_k, most_q, most_k, p, causal, *state, **more
    ):
        args = (dout, q, k, v, out, lse, of_q, of_k, most_q, most_k, p, causal, *state)
        shapes = [t.shape for t in self._meta("_flash_attention_backward", args, more)]
        assert shapes == [q.shape, k.shape, v.shape]
        dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (q, k, v))
        window = more.get("window_size_left", -1)
        for rows, keys, seen in self._documents(
            q, k, (of_q, of_k), (most_q, most_k), causal, window
        ):
            at = (rows, rows, keys, keys, rows)
            some = [t[where][None] for t, where in zip((dout, q, k, v, out), at, strict=True)]
            given = Given(*some, lse[:, rows][None])
            got = kernels.backward(given, seen, more["scale"])
            dq[rows], dk[keys], dv[keys] = (t[0] for t in got)
        return dq, dk, dv


def by_flash(me: Rank, *args: Any, **options: Any) -> Any:
    class Stream:
        cuda_stream = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_flash", lambda q, k, v: q.shape[1] > 0 and k.shape[1] > 0)
        patch.setattr(kernels, "aten", Flash())
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream)
        return attend(me, *args, **options)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("window", [None, 1, 9, 50])
def test_calls_of_flash(world: World, window: int | None, batch: int):
    """What a GPU's operator is given, with an operator in its place that does what its
    documentation says."""
    problem = Problem(batch=batch, rows=ROWS, keys=ROWS, heads=4, kv_heads=2)
    ends = [0, 6, 18, 18, 24] if window is None else [0, 1, 2, 7, 8, 12, 12, 24]
    layout = "zigzag" if window is None else "contiguous"
    parts = world.run((1, 2, 3), by_flash, problem, ends, layout, window=window)
    more = {"cu_seqlens": ends} if window is None else {}
    worst = wrong(joined(parts, layout, **more), masked(problem, ends, window))
    assert max(worst.values()) <= EXACT, worst


def test_ends_without_documents_come_from_the_device(monkeypatch: pytest.MonkeyPatch):
    """The capture of a CUDA graph, in which a window may be, has no uploads."""

    def refuse(*_: object) -> None:
        raise AssertionError("uploaded")

    monkeypatch.setattr(kernels, "on_device", refuse)
    found = kernels._ends((0, 5), 3, 5, torch.device("cpu"), 0)
    assert found.tolist() == [0, 5, 10, 15] and found.dtype == torch.int32


def without_one(me: Rank, options: dict[str, Any]) -> tuple[str, str] | None:
    """What the last of three ranks learns when the others do not come."""
    with group_of_three(me) as group:
        if me.rank != MEMBERS[-1]:
            return None
        x = torch.ones(1, 8, 2, 8)
        options = {**options, "causal": True, "group": group, "agreed": True}
        return attempt(group, lambda: ringx_attention(x, x, x, **options))


@pytest.mark.parametrize(
    ("options", "step"),
    [({"window": 100}, "the all-to-all"), ({"cu_seqlens": [0, 12, 24]}, "the all-gather")],
    ids=["window", "documents"],
)
def test_ranks_that_do_not_come(world: World, options: dict[str, Any], step: str):
    kind, text = world.run((0, 1, 2, 3), without_one, options)[3]
    assert kind in ("TimeoutError", "Error")
    assert text.startswith(f"ringx: forward: {step} "), text
    assert "on rank 2 of the group (global ranks [0, 1, 3])" in text
