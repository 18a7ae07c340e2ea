"""Attention over ranks by every kernel of the device, beside one process alone: errors against
float64, calls right behind each other, and CUDA graphs; packed documents and sliding windows; a
group of gloo's; and torch's ways of tools/ringx_bench.py.

On the CPU this runs over gloo. On GPUs there are as many processes as RANKS says ("2 4" is the
default, if there are so many GPUs), over NCCL. On a single GPU with RANKS, all processes share it,
over gloo and by copies, which needs NVIDIA's multi-process service (MPS).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exact import ROWS, Problem, Shard, call, dense, seen, shard
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from world import Rank, World, keep_groups

from fserver.errors import ConfigError
from fserver.ringx import kernels, layout_of, ringx_attention
from fserver.ringx.kernels import Given

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import ringx_bench  # noqa: E402

GPUS = torch.cuda.device_count()
SIZES = os.environ.get("RANKS", "").split() or [n for n in (2, 4) if n <= GPUS] or ["gloo"]
ON_GPU = SIZES != ["gloo"]
ROUNDING = 2e-2 if ON_GPU else 1e-6
"""Of the largest number. GPUs add up in any order, and round to 16 bits."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Kernels and types; rows of each rank, heads of q and of k and v. 1,000 is no multiple of a block.
if ON_GPU:
    KINDS = [(kernel, dtype) for kernel in ("cudnn", "flash", "efficient") for dtype in (BF16, F16)]
    KINDS.append(("efficient", F32))
    SHAPES, LONG, DIM = [(1024, 8, 2), (1000, 4, 4)], [(8192, 4, 2), (8192, 4, 4)], 128
else:
    KINDS = [("cpu", dtype) for dtype in (BF16, F16, F32)]
    SHAPES, LONG, DIM = [(64, 4, 2)], [], 16
CASES = [(*kind, shape) for kind in KINDS for shape in SHAPES]
CASES += [(*KINDS[0], shape) for shape in LONG]
# By "efficient", context parallel of torch 2.11 has wrong gradients under the causal mask.
OTHERS = [kind for kind in KINDS if kind[0] != "efficient"]

ANSWERS = ("out", "dq", "dk", "dv")

Call = Callable[[Shard], dict[str, Tensor]]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    if not ON_GPU:
        yield request.getfixturevalue("world")
        return
    made = World(tmp_path_factory.mktemp("gpus"), int(request.param), "cuda")
    yield made
    made.close()


def run(ranks: World, function: Callable[..., Any], *args: Any) -> list[Any]:
    return ranks.run(range(ranks.size), function, *args)


def problem_of(me: Rank, dtype: torch.dtype, shape: tuple[int, int, int]) -> Problem:
    rows, heads, kv_heads = shape
    where = f"cuda:{torch.cuda.current_device()}" if ON_GPU else "cpu"
    length = rows * me.size
    return Problem(1, length, length, heads, kv_heads, DIM, dtype=dtype, device=where)


def by(kernel: str) -> AbstractContextManager[Any]:
    if kernel == "cpu":
        return nullcontext()
    return sdpa_kernel(getattr(SDPBackend, f"{kernel.upper()}_ATTENTION"))


def ours(me: Rank, problem: Problem, causal: bool) -> Iterator[tuple[str, str, Call]]:
    """Name, layout and call of each algorithm with each option."""
    if problem.ends is not None or problem.window is not None:
        layout = layout_of("auto", causal, window=problem.window)
        for agreed in (None, True):
            yield f"auto {agreed}", layout, partial(masked, me, problem, agreed=agreed)
        return
    for way in ringx_bench.methods(causal, 0, torch.device("cpu")):
        if way.of == "ringx":
            name, *options = way.name.split()
            row = next(row for row in ROWS if ROWS[row][:2] == (name, causal))
            for agreed in (None, True):
                given = {**dict.fromkeys(options, True), "agreed": agreed}
                yield f"{way.name} {agreed}", way.layout, partial(call, me, algorithm=row, **given)


def masked(me: Rank, problem: Problem, mine: Shard, agreed: bool | None) -> dict[str, Tensor]:
    """A call with the documents and the window of the problem."""
    options: dict[str, Any] = {"cu_seqlens": problem.ends, "window": problem.window}
    out = ringx_attention(*mine.leaves, causal=True, group=me.group, agreed=agreed, **options)
    grads = torch.autograd.grad(out, mine.leaves, mine.dout)
    return dict(zip(ANSWERS, (out.detach(), *grads), strict=True))


def alone(problem: Problem, causal: bool) -> dict[str, Tensor]:
    """The kernel in one process; of packed documents and a window, torch's attention by a mask."""
    q, k, v, dout, _ = problem.tensors()
    if problem.ends is not None or problem.window is not None:
        mask = seen(problem, causal, torch.arange(problem.rows, device=q.device))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        times = problem.heads // problem.kv_heads
        heads = (q, *(t.repeat_interleave(times, 2) for t in (k, v)))
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if ON_GPU else nullcontext():
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), mask)
        grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
        return dict(zip(ANSWERS, (out.detach().transpose(1, 2), *grads), strict=True))
    out, lse = kernels.forward(q, k, v, causal, problem.dim**-0.5)
    given = Given(dout, q, k, v, out.contiguous(), lse)
    grads = kernels.backward(given, causal, problem.dim**-0.5)
    return dict(zip(ANSWERS, (out, *grads), strict=True))


def error(found: Tensor, want: Tensor) -> float:
    """Root mean square."""
    return float((found.double() - want).square().mean().sqrt())


def errors(
    me: Rank, problem: Problem, causal: bool, calls: Iterator[tuple[str, str, Call]]
) -> dict[str, Any]:
    """The errors of each call in the rows of this rank, each beside that of one process there; of a
    call that no kernel takes, which raises before anything is sent, the reason."""
    want, single = dense(problem, causal), alone(problem, causal)
    found: dict[str, Any] = {}
    for name, layout, function in calls:
        mine = shard(me, problem, layout)
        try:
            got = function(mine)
        except ConfigError as refusal:
            found[name] = str(refusal)
            continue
        found[name] = {}
        for what in single:
            right = want[what][:, mine.rows]
            pair = error(got[what], right), error(single[what][:, mine.rows], right)
            found[name][what] = pair
    return found


def errors_of_ours(me: Rank, kernel: str, dtype: Any, shape: Any, causal: bool) -> dict[str, Any]:
    problem = problem_of(me, dtype, shape)
    with by(kernel):
        return errors(me, problem, causal, ours(me, problem, causal))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_one_process(ranks: World, case: tuple, causal: bool):
    judge(run(ranks, errors_of_ours, *case, causal))


def judge(answers: list[dict[str, Any]]) -> None:
    wrong = {
        (rank, name, what): pair
        for rank, found in enumerate(answers)
        for name, pairs in found.items()
        if not isinstance(pairs, str)
        for what, pair in pairs.items()
        if not pair[0] <= 2 * pair[1]
    }
    assert answers[0] and not wrong, wrong
    if refusals := [pairs for pairs in answers[0].values() if isinstance(pairs, str)]:
        pytest.skip(f"{len(refusals)} of {len(answers[0])} ways: {refusals[0]}")


def differences(
    me: Rank, kernel: str, problem: Problem, causal: bool, calls: Iterator[tuple[str, str, Call]]
) -> dict[str, float]:
    """The largest difference between calls, each with other numbers, right behind each other and
    the same calls each alone, over the largest number."""

    def settle() -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        dist.barrier(me.group)

    found = {}
    for name, layout, function in calls:
        shards = [shard(me, replace(problem, seed=seed), layout) for seed in range(4)]
        one_by_one = []
        with by(kernel):
            for mine in shards:
                settle()
                one_by_one.append(function(mine))
            settle()
            together = [function(mine) for mine in shards]
            settle()
        pairs = zip(one_by_one, together, strict=True)
        found[name] = max(worst(others, some) for some, others in pairs)
    return found


def worst(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference, over the largest number. NaN is infinite."""
    each = ((found[n] - want[n]).abs().max() / want[n].abs().max() for n in ANSWERS)
    return max(float(torch.nan_to_num(e, nan=torch.inf)) for e in each)


def differences_of_ours(
    me: Rank, kernel: str, dtype: Any, shape: Any, causal: bool
) -> dict[str, float]:
    problem = problem_of(me, dtype, shape)
    return differences(me, kernel, problem, causal, ours(me, problem, causal))


@pytest.mark.parametrize(
    "causal",
    [
        pytest.param(True, id="causal"),
        pytest.param(False, id="full", marks=[] if ON_GPU else [pytest.mark.long]),
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if ON_GPU or BF16 in case else [pytest.mark.long])
        for case in CASES
    ],
    ids=str,
)
def test_calls_right_behind_each_other(ranks: World, case: tuple, causal: bool):
    for found in run(ranks, differences_of_ours, *case, causal):
        assert found and max(found.values()) <= ROUNDING, found


def replayed(me: Rank, causal: bool, window: int | None) -> dict[str, float]:
    """The largest difference between each agreed call and its replay from a CUDA graph."""
    problem, found = replace(problem_of(me, BF16, SHAPES[0]), window=window), {}
    stream = torch.cuda.Stream()
    for name, layout, function in ours(me, problem, causal):
        with torch.cuda.stream(stream):  # what autograd keeps is of the stream that made it
            mine = shard(me, problem, layout)
            want = function(mine, agreed=True)
            stream.synchronize()
            dist.barrier(me.group)
            torch.cuda.synchronize()  # also NCCL's streams, whose watchdog asks events of theirs
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
                got = function(mine, agreed=True)
            for _ in range(2):
                for tensor in got.values():
                    tensor.fill_(torch.nan)
                captured.replay()
            stream.synchronize()
        found[name] = worst(got, want)
    return found


def need_nccl(ranks: World) -> None:
    if ON_GPU and GPUS < ranks.size:
        pytest.skip("NCCL needs a GPU for each rank")


@pytest.mark.skipif(not ON_GPU, reason="needs GPUs")
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, None), (False, None), (True, 300)],
    ids=["causal", "full", "window"],
)
def test_replays_of_graphs(ranks: World, causal: bool, window: int | None):
    need_nccl(ranks)
    for found in run(ranks, replayed, causal, window):
        assert found and max(found.values()) <= ROUNDING, found


def masked_problem(me: Rank, kernel: str, dtype: torch.dtype, mask: str) -> Problem:
    """A batch of two, with packed documents, a window that is shorter than the part of a rank, one
    that is longer, or documents of any length and a window."""
    problem = replace(problem_of(me, dtype, SHAPES[0]), batch=2)
    part = problem.rows // me.size
    least = 8 if kernel == "cudnn" else 1  # cuDNN need not take blocks with a single key
    chunks = (least, 0, part // 8, least, part // 4, part // 8 - 2 * least)
    packed = (0, *accumulate(2 * me.size * chunk for chunk in chunks))
    uneven = (0, 1, part - 7, part - 7, part + 2, problem.rows)
    return {
        "documents": replace(problem, ends=packed),
        "short": replace(problem, window=part // 3),
        "long": replace(problem, window=part + part // 2),
        "both": replace(problem, ends=uneven, window=part // 3),
    }[mask]


MASKS = ("documents", "short", "long", "both")
BEST = "flash" if ON_GPU else "cpu"
"""The kernel that takes all documents in one call, if there is one."""


def errors_by_masks(me: Rank, kernel: str, dtype: Any, mask: str) -> dict[str, Any]:
    problem = masked_problem(me, kernel, dtype, mask)
    with by(kernel):
        return errors(me, problem, True, ours(me, problem, True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_documents_and_windows(ranks: World, kind: tuple, mask: str):
    """Under a window, kernels other than flash leave the work to the reference kernel."""
    judge(run(ranks, errors_by_masks, *kind, mask))


def differences_by_masks(me: Rank, mask: str) -> dict[str, float]:
    problem = masked_problem(me, BEST, BF16, mask)
    return differences(me, BEST, problem, True, ours(me, problem, True))


@pytest.mark.parametrize("mask", MASKS)
def test_documents_and_windows_right_behind_each_other(ranks: World, mask: str):
    for found in run(ranks, differences_by_masks, mask):
        assert found and max(found.values()) <= ROUNDING, found


@cache
def of_gloo() -> dist.ProcessGroup:
    """A group of gloo's with all ranks. All of them make the first call together."""
    group = dist.new_group(backend="gloo")
    keep_groups()
    return group


def over_gloo(me: Rank, causal: bool, mask: str | None) -> dict[str, Any]:
    """The errors by collectives of gloo's, which take tensors of GPUs by way of the CPU."""
    me = replace(me, group=of_gloo())
    problem = masked_problem(me, BEST, BF16, mask) if mask else problem_of(me, BF16, SHAPES[0])
    calls = (one for one in ours(me, problem, causal) if "copies" not in one[0])
    with by(BEST):
        return errors(me, problem, causal, calls)


@pytest.mark.parametrize(
    ("causal", "mask"), [(True, None), (False, None), *((True, mask) for mask in MASKS)], ids=str
)
def test_over_gloo(ranks: World, causal: bool, mask: str | None):
    judge(run(ranks, over_gloo, causal, mask))


def errors_of_others(me: Rank, kernel: str, dtype: Any, causal: bool) -> dict[str, Any]:
    problem = problem_of(me, dtype, (SHAPES[0][0], 8, 4))
    found = ringx_bench.methods(causal, problem.rows, torch.device(problem.device))
    calls = ((way.name, way.layout, partial(attended, way)) for way in found if way.of == "torch")
    with by(kernel):
        return errors(me, problem, causal, calls)


def attended(way: ringx_bench.Method, mine: Shard) -> dict[str, Tensor]:
    with way.around():
        out = way.attend(*mine.leaves)
        grads = torch.autograd.grad(out, mine.leaves, mine.dout)
    return dict(zip(ANSWERS, (out.detach(), *grads), strict=True))


@pytest.mark.skipif(not ON_GPU, reason="torch's ways need GPUs")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_others_are_right_too(ranks: World, kind: tuple, causal: bool):
    """A comparison with wrong answers would be worth nothing."""
    need_nccl(ranks)
    judge(run(ranks, errors_of_others, *kind, causal))
