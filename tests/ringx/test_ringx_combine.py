"""Parts of an answer made one: torch's way against float64, and Triton's kernel, run by Triton's
interpreter, against torch's."""

import copy
import os
import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from exact import poison

import fserver.ringx
from fserver.ringx import combine
from fserver.ringx.combine import Parts
from fserver.ringx.part import Part

ROWS = 12


def part(rows: slice, dtype: torch.dtype, width: int = 24, answer: bool = True) -> Part:
    """Of 2 x 3 heads, with the heads before the rows in memory, as kernels give them."""
    n = rows.stop - rows.start
    value = torch.randn(2, 3, n, width, dtype=torch.float64).to(dtype).transpose(1, 2)
    kept = torch.float64 if dtype is torch.float64 else torch.float32
    return Part(rows, value, torch.randn(2, 3, n, dtype=kept) * 40 if answer else None)


def parts(*dtypes: torch.dtype, answer: bool = True, width: int = 24) -> list[Part]:
    where = [slice(0, ROWS), slice(ROWS // 2, ROWS), slice(2, 5), slice(0, ROWS)]
    return [part(rows, dtype, width, answer) for rows, dtype in zip(where, dtypes, strict=False)]


def wanted(some: list[Part]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """By the definition, over all parts at once."""
    values, levels = [], []
    for rows, value, lse in some:
        all_rows = torch.zeros(2, ROWS, *value.shape[2:], dtype=torch.float64)
        all_rows[:, rows] = value.double()
        values.append(all_rows)
        level = torch.full((2, 3, ROWS), -torch.inf, dtype=torch.float64)
        level[:, :, rows] = 0 if lse is None else lse.double()
        levels.append(level)
    value, level = torch.stack(values), torch.stack(levels)
    if some[0].lse is None:
        return value.sum(0), None
    weights = level.softmax(0).transpose(2, 3)[..., None]
    return (value * weights).sum(0), level.logsumexp(0)


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("most", [2, 3, 4])
def test_combine(most, answer):
    torch.manual_seed(0)
    some = parts(*[torch.float64] * 4, answer=answer)
    want, level = wanted(some)
    collected = Parts(ROWS, torch.float64, most)
    for one in some:
        collected.add(*one)
    value, lse = collected.result(torch.float64)
    assert value.is_contiguous() and value.shape == (2, ROWS, 3, 24)
    torch.testing.assert_close(value, want, rtol=1e-13, atol=1e-13)
    if answer:
        torch.testing.assert_close(lse, level, rtol=1e-13, atol=1e-13)
    else:
        assert lse is None


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_combine_writes_all_of_new_memory(narrow):
    """A first part of some rows has no room for all, and one whose lse has gaps none for lse."""
    torch.manual_seed(0)
    for first in (slice(0, ROWS // 2), slice(0, ROWS)):
        some = [part(first, narrow), part(slice(ROWS // 2, ROWS), narrow)]
        gaps = some[0].lse.transpose(1, 2).contiguous().transpose(1, 2)
        some[0] = Part(first, some[0].value, gaps)
        want, level = wanted(some)
        with poison():
            value, lse = combine.combine(some, ROWS, narrow)
        error = 1e-2 if narrow is torch.bfloat16 else 1e-4
        torch.testing.assert_close(value.double(), want, rtol=error, atol=error)
        torch.testing.assert_close(lse.double(), level, rtol=1e-6, atol=1e-6)


def test_combine_one():
    one = part(slice(0, ROWS), torch.bfloat16)
    value, lse = combine.combine([one], ROWS, torch.float32)
    assert value.is_contiguous() and value.equal(one.value.float()) and lse is one.lse


def test_combine_rounds_once():
    """The sum of bfloat16 parts is that of float32, rounded."""
    some = parts(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    wide, _ = combine.combine(copy.deepcopy(some), ROWS, torch.float32)
    narrow, _ = combine.combine(some, ROWS, torch.bfloat16)
    assert narrow.equal(wide.to(torch.bfloat16))


def interpreted() -> None:
    """In a process whose Triton interprets."""
    from fserver.ringx import fused

    torch.manual_seed(0)
    half, single = torch.bfloat16, torch.float32
    for types in ((half,) * 4, (single, half, half), (single, single), (half, half)):
        for answer in (True, False):
            for width in (24, 64):
                some = parts(*types, answer=answer, width=width)
                want, level = wanted(some)
                for dtype in (half, single):
                    out = torch.full(want.shape, torch.nan, dtype=dtype)
                    lse = torch.full(level.shape, torch.nan) if answer else None
                    fused.combine(some, out, lse)
                    error = 8e-3 if dtype is half else 1e-6  # the interpreter truncates
                    torch.testing.assert_close(out.double(), want, rtol=error, atol=error)
                    if answer:
                        torch.testing.assert_close(lse.double(), level, rtol=1e-6, atol=1e-6)
    # In place, as the second time that parts are made one.
    some = parts(single, half, half)
    some[0] = Part(some[0].rows, some[0].value.contiguous(), some[0].lse)
    want, level = wanted(some)
    fused.combine(some, *some[0][1:])
    torch.testing.assert_close(some[0].value.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(some[0].lse.double(), level, rtol=1e-6, atol=1e-6)
    # A row that no part knows is 0 and -inf.
    out, lse = torch.full((2, ROWS, 3, 24), torch.nan), torch.full((2, 3, ROWS), torch.nan)
    fused.combine([part(slice(3, ROWS), half), part(slice(5, ROWS), half)], out, lse)
    assert (out[:, :3] == 0).all() and (lse[:, :, :3] == -torch.inf).all()
    assert out.isfinite().all() and lse[:, :, 3:].isfinite().all()


class Kernel(ModuleType):
    """In the place of `fserver.ringx.fused`. Each call of combine takes one of the outcomes."""

    def __init__(self, *outcomes: Exception | None):
        super().__init__("fserver.ringx.fused")
        self.outcomes = [*outcomes]

    def combine(self, parts: list[Part], out: torch.Tensor, lse: torch.Tensor) -> None:
        outcome = self.outcomes.pop(0)
        if outcome:
            raise outcome


CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last number is the time."""
    times = [1000.0]
    monkeypatch.setattr(combine.time, "monotonic", lambda: times[-1])
    return times


def with_kernel(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType | None) -> combine.Trial:
    monkeypatch.setitem(sys.modules, "fserver.ringx.fused", kernel)
    monkeypatch.setattr(fserver.ringx, "fused", kernel, raising=False)
    if kernel is None:
        monkeypatch.delattr(fserver.ringx, "fused")
    return combine.Trial()


def test_failed_trial_is_repeated(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """Such as one without memory: after a minute, not at each call. A success is for good."""
    kernel = Kernel(torch.OutOfMemoryError("full"), RuntimeError("no compiler"), None)
    trial = with_kernel(monkeypatch, kernel)
    with pytest.warns(UserWarning, match="is tried again after 60 s: full"):
        assert trial.module(CPU) is None
    clock.append(1059.9)
    assert trial.module(CPU) is None and len(kernel.outcomes) == 2
    clock.append(1060.0)
    with pytest.warns(UserWarning, match="no compiler"):
        assert trial.module(CPU) is None
    clock.append(1120.0)
    assert trial.module(CPU) is kernel and not kernel.outcomes
    clock.append(9000.0)
    assert trial.module(CPU) is kernel


def test_missing_triton_is_looked_for_once(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    trial = with_kernel(monkeypatch, None)
    assert trial.module(CPU) is None
    monkeypatch.undo()
    clock.append(1e9)
    with_kernel(monkeypatch, Kernel(None))
    assert trial.module(CPU) is None


def test_nothing_is_tried_in_a_capture(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """A CUDA error there would end the capture, and would say nothing of the kernel."""
    kernel = Kernel(None)
    trial, gpu = with_kernel(monkeypatch, kernel), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert trial.module(gpu) is None and kernel.outcomes
    assert trial.module(CPU) is kernel
    assert trial.module(gpu) is kernel


def test_fused():
    pytest.importorskip("triton", reason="Triton is not installed, and torch's kernels are used")
    code = "from test_ringx_combine import interpreted; interpreted()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore:divide by zero:RuntimeWarning", "-c", code],
        cwd=os.path.dirname(__file__),
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_fused_in_place():
    """On a GPU, where threads run apart: what is written over a part is what is written beside."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: the interpreter has one thread")
    pytest.importorskip("triton", reason="Triton is not installed, and torch's kernels are used")
    from fserver.ringx import fused

    torch.manual_seed(0)
    rows, beside = 1 << 13, torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    wrong = 0
    for _ in range(60):
        some = []
        for _ in range(2):
            value = torch.randn(1, rows, 8, 128, device="cuda", dtype=torch.bfloat16)
            some.append(Part(slice(0, rows), value, torch.randn(1, 8, rows, device="cuda")))
        first = some[0]
        kept = Part(first.rows, first.value.clone(), first.lse.clone())
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            busy @ busy
        fused.combine(some, *first[1:])
        torch.cuda.synchronize()
        want = torch.empty_like(kept.value), torch.empty_like(kept.lse)
        fused.combine([kept, some[1]], *want)
        wrong += any(not a.equal(b) for a, b in zip(first[1:], want, strict=True))
    assert wrong == 0
