"""integrations/ringx_attn: RingX's modules and functions, with RingX's arguments and layouts."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from exact import EXACT, Lengths, Problem, assembled, dense, errors, split
from launch import launched
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from world import Rank, World

from fserver.errors import ConfigError, Error
from fserver.ringx import kernels, shard, unshard

ROOT = Path(__file__).parents[2]
DROPIN = ROOT / "integrations/ringx_attn"
sys.path.insert(0, str(DROPIN))

import ringX_attn  # noqa: E402  (it is not installed)

MODULES = {
    "ringX1_attn": (False, "contiguous"),
    "ringX1o_attn": (False, "contiguous"),
    "ringX2_attn": (True, "contiguous"),
    "ringX2o_attn": (True, "contiguous"),
    "ringX3_attn": (True, "zigzag"),
    "ringX3b_attn": (False, "zigzag"),
    "ringX4_attn": (True, "zigzag"),
    "ringX4o_attn": (True, "zigzag"),
}
"""RingX's modules, with the mask and the parts for which its programs use each."""

FUNCTIONS = [*(f"{module}_func" for module in MODULES), "ringX_varlen_attn_func"]

PARAMETERS = {
    **dict.fromkeys("qkv", inspect.Parameter.empty),
    **{"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1)},
    **{"alibi_slopes": None, "deterministic": False, "return_attn_probs": False, "group": None},
}
"""Of each function, with the defaults, in RingX's order."""

GROUPS = (0, 1), (1, 2, 3), (0, 1, 2, 3)


def computed(
    me: Rank, function: str, problem: Problem, causal: bool, rows: Tensor, keys: Tensor
) -> dict[str, Tensor]:
    """out, lse and the gradients of the local rows and keys. All arguments are positional."""
    q, k, v, dout, _ = problem.tensors()
    leaves = [t.requires_grad_() for t in (q[:, rows], k[:, keys], v[:, keys])]
    arguments = 0.0, problem.dim**-0.5, causal, (-1, -1), None, False, True, me.group
    out, lse, nothing = getattr(ringX_attn, function)(*leaves, *arguments)
    assert nothing is None
    out.backward(dout[:, rows])
    grads = {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def of_layout(me: Rank, module: str, problem: Problem) -> dict[str, Tensor]:
    causal, layout = MODULES[module]
    where = shard(torch.arange(problem.rows), layout, me.rank, me.size, dim=0)
    return computed(me, f"{module}_func", problem, causal, where, where)


@pytest.mark.parametrize("members", GROUPS, ids=len)
@pytest.mark.parametrize("module", MODULES)
def test_is_the_unsplit_model(world: World, module: str, members: tuple[int, ...]):
    problem = Problem(batch=2, heads=4, kv_heads=2)
    causal, layout = MODULES[module]
    parts = world.run(members, of_layout, module, problem)
    dim = dict.fromkeys(parts[0], 1) | {"lse": 2}
    found = {name: unshard([part[name] for part in parts], layout, dim[name]) for name in dim}
    worst = errors(found, dense(problem, causal))
    assert max(worst.values()) <= EXACT, worst


def uneven(me: Rank, problem: Problem, lengths: Lengths) -> dict[str, Tensor]:
    rows, keys = (split(sum(of), of, "contiguous", me.rank, me.size) for of in lengths)
    return computed(me, "ringX_varlen_attn_func", problem, False, rows, keys)


@pytest.mark.parametrize(
    "lengths",
    [((13, 8), (13, 8)), ((5, 9, 1), (5, 9, 1)), ((3, 0, 7, 4), (6, 2, 1, 9))],
    ids=["2", "3", "4-keys-of-another-sequence"],
)
def test_varlen_is_the_unsplit_model(world: World, lengths: Lengths):
    problem = Problem(batch=2, rows=sum(lengths[0]), keys=sum(lengths[1]), heads=4, kv_heads=2)
    parts = world.run(GROUPS[len(lengths[0]) - 2], uneven, problem, lengths)
    worst = errors(assembled(parts, problem, "X1o", lengths), dense(problem, causal=False))
    assert max(worst.values()) <= EXACT, worst


def results(me: Rank, function: str, causal: bool) -> list[Any]:
    """Types and shapes of the result, by return_attn_probs."""
    q = torch.ones(1, 4, 2, 8)
    found = []
    for options in {}, {"return_attn_probs": False}, {"return_attn_probs": True}:
        result = getattr(ringX_attn, function)(q, q, q, causal=causal, group=me.group, **options)
        one = isinstance(result, Tensor)
        found.append([None if t is None else (*t.shape,) for t in ((result,) if one else result)])
    return found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_return_attn_probs(world: World, function: str):
    causal, _ = MODULES.get(function.removesuffix("_func"), (False, ""))
    out = (1, 4, 2, 8)
    want = [[out], [out], [out, (1, 2, 4), None]]
    assert world.run((0, 1), results, function, causal) == [want] * 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signatures(function: str):
    found = getattr(ringX_attn, function)
    parameters = inspect.signature(found).parameters.values()
    assert {p.name: p.default for p in parameters} == PARAMETERS
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert found.__name__ == found.__qualname__ == function
    assert getattr(import_module(found.__module__), function) is found


def test_modules_and_package_have_the_same_functions():
    for module in MODULES:
        function = getattr(ringX_attn, f"{module}_func")
        assert getattr(import_module(module), f"{module}_func") is function
        assert getattr(import_module(f"ringX_attn.{module}"), f"{module}_func") is function
    assert {*ringX_attn.__all__} >= {*FUNCTIONS}


def raised(me: Rank, calls: list[dict[str, Any]], only: int | None) -> list[str]:
    """What each call raises on this rank. If `only` is given, the other ranks call it well."""
    found = []
    for call in calls:
        call = dict(call)
        function = getattr(ringX_attn, call.pop("function"))
        causal = MODULES.get(function.__name__.removesuffix("_func"), (False, ""))[0]
        q = torch.ones(1, call.pop("length", 4) if only in (None, me.rank) else 4, 2, 8)
        options = {"causal": causal, **(call if only in (None, me.rank) else {})}
        try:
            function(q, q, q, group=me.group, **options)
        except Error as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
    return found


REFUSED = [
    *(
        (
            {"function": f"{module}_func", "causal": not causal},
            f"ConfigError: ringx: algorithm X{module[5:-5]} with causal={not causal}: its mask is "
            + ("causal (use causal=True" if causal else "full (use causal=False"),
        )
        for module, (causal, _) in MODULES.items()
    ),
    ({"function": "ringX_varlen_attn_func", "causal": True}, "ConfigError: ringx: algorithm X1o"),
    ({"function": "ringX1o_attn_func", "dropout_p": 0.1}, "ConfigError: ringx: dropout_p 0.1 of "),
    (
        {"function": "ringX3_attn_func", "window_size": (8, 0)},
        "ringx: window_size (8, 0) of type tuple: w",
    ),
    (
        {"function": "ringX4_attn_func", "alibi_slopes": torch.ones(2)},
        "alibi_slopes tensor([1., 1.]) of type Tensor: w",
    ),
    ({"function": "ringX2_attn_func", "softmax_scale": -1.0}, "ringx: scale -1.0 of type float: w"),
    ({"function": "ringX3_attn_func", "length": 5}, "ShapeError: ringx: q.shape[1] is 5, but zigz"),
]


def test_refuses(world: World):
    for found in world.run((0, 1), raised, [call for call, _ in REFUSED], None):
        for (call, want), text in zip(REFUSED, found, strict=True):
            assert want in text, call


def test_one_rank_that_is_wrong_is_an_error_on_all(world: World):
    first, second, third = world.run((1, 2, 3), raised, [call for call, _ in REFUSED], 1)
    for (call, want), text in zip(REFUSED, second, strict=True):
        assert want in text, call
    theirs = "ringx: rank 1 of the group has refused its own arguments: "
    assert first == third == [text.replace("ringx: ", theirs, 1) for text in second]


def kernels_of(me: Rank, backend: str, function: str, causal: bool) -> list[set[str]]:
    """The kernels of forward and of backward, in a program that wants the reference's."""
    used: set[str] = set()

    def noted(*args: Any) -> kernels.Kernel:
        kernel = choose(*args)
        used.add(kernel.name)
        return kernel

    choose = kernels.choose
    found = []
    q = torch.ones(1, 4, 2, 8, requires_grad=True)
    ringX_attn.set_backend(backend)
    try:
        with mock.patch.object(kernels, "choose", noted):
            with sdpa_kernel(SDPBackend.MATH) if backend != "portable" else nullcontext():
                out = getattr(ringX_attn, function)(q, q, q, causal=causal, group=me.group)
            found.append({*used})
            used.clear()
            ringX_attn.set_backend("auto")  # what backward does has been decided
            out.sum().backward()
    finally:
        ringX_attn.set_backend("auto")
    return [*found, used]


@pytest.mark.parametrize("function", ["ringX1_attn_func", "ringX3_attn_func"])
@pytest.mark.parametrize(
    ("backend", "kernel"),
    [("auto", "reference"), ("portable", "reference"), ("flash_attn", "cpu flash")],
)
def test_backends_choose_kernels(world: World, backend: str, kernel: str, function: str):
    causal, _ = MODULES[function.removesuffix("_func")]
    found = world.run((0, 1), kernels_of, backend, function, causal)
    assert found == [[{kernel}, {kernel}]] * 2


def test_backends():
    assert ringX_attn.get_backend() == "auto"
    assert ringX_attn.available_backends() == ("portable", "flash_attn")
    try:
        for name in (*ringX_attn.available_backends(), "auto"):
            ringX_attn.set_backend(name)
            assert ringX_attn.get_backend() == name
    finally:
        ringX_attn.set_backend("auto")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fused", "backend 'fused': fserver.ringx has no Triton kernel for attention: want one of"),
        ("triton", "backend 'triton': want one of ['auto', 'portable', 'flash_attn']"),
        (None, "backend None: want one of"),
        (["auto"], "backend ['auto']: want one of"),
    ],
)
def test_refuses_backends(name: Any, text: str):
    with pytest.raises(ConfigError) as error:
        ringX_attn.set_backend(name)
    assert f"ringX_attn: {text}" in str(error.value)
    assert ringX_attn.get_backend() == "auto"


def python(text: str, *search: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, which finds modules in `search` and in the repository."""
    path = os.pathsep.join(map(str, (*search, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path, **env}, cwd="/",
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "chosen"),
    [("portable", "portable"), pytest.param("", "auto", marks=pytest.mark.long)],
)
def test_environment_variable(value: str, chosen: str):
    text = "import ringX_attn; print(ringX_attn.get_backend())"
    done = python(text, DROPIN, RINGX_ATTN_BACKEND=value)
    assert (done.returncode, done.stdout) == (0, f"{chosen}\n"), done.stderr


def test_environment_variable_with_a_wrong_value():
    done = python("from ringX3_attn import ringX3_attn_func", DROPIN, RINGX_ATTN_BACKEND="fused")
    assert "ConfigError: ringX_attn: RINGX_ATTN_BACKEND 'fused': fserver.ringx has" in done.stderr


IMPORTS = "\n".join(
    [
        "import sys",
        *(f"from {module} import {module}_func as a" for module in MODULES),
        *(f"from ringX_attn.{module} import {module}_func as b" for module in MODULES),
        f"from ringX_attn import {', '.join(FUNCTIONS)}",
        "from ringX_attn import set_backend, get_backend, available_backends",
        "import ringX_attn",
        "assert 'fserver._C' not in sys.modules",
        "print(ringX_attn.__file__)",
    ]
)


@pytest.mark.long
@pytest.mark.parametrize("module", ["ringX4o_attn", "ringX_attn"])
def test_import_in_a_fresh_process(module: str):
    done = python(f"from {module} import ringX4o_attn_func as f; print(f.__module__)", DROPIN)
    assert (done.returncode, done.stdout) == (0, "ringX_attn.ringX4o_attn\n"), done.stderr


def test_another_fserver():
    """As that of PyPI, which is another program and has no ringx."""
    done = python("import sys; sys.modules['fserver.ringx'] = None; import ringX3_attn", DROPIN)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ringX_attn needs fserver: ")
    assert "run pip install with the folder of the repository" in last


def test_pip_installs_it(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(DROPIN, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--no-index", "--target", str(target), str(source)],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (metadata,) = target.glob("fserver_ringx_attn-*.dist-info/METADATA")
    # PyPI's fserver is another program.
    assert "Requires-Dist" not in metadata.read_text()
    found = {path.name for path in target.iterdir()} - {"__pycache__", metadata.parent.name}
    assert found == {"ringX_attn", *(f"{module}.py" for module in MODULES)}
    done = python(IMPORTS, target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(target / "ringX_attn/__init__.py")


PROGRAM = """
import importlib
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for module, causal in {modules}.items():
    function = getattr(importlib.import_module(module), f"{{module}}_func")
    q, k, v, dout = torch.randn(4, 1, 8, 2, 8).unbind()
    for t in (q, k, v):
        t.requires_grad = True
    out = function(
        q, k, v, causal=causal, window_size=(-1, -1), alibi_slopes=None, deterministic=False,
        return_attn_probs=False, group=dist.group.WORLD,
    )
    out.backward(dout)
    assert all(t.grad.shape == t.shape and t.grad.isfinite().all() for t in (q, k, v))
    if dist.get_rank() == 0:
        print(function.__name__)
dist.destroy_process_group()
"""


def test_a_program_that_names_modules(tmp_path: Path):
    """As RingX's benchmark finds and calls the functions."""
    program = tmp_path / "program.py"
    masks = {module: causal for module, (causal, _) in MODULES.items()}
    program.write_text(PROGRAM.format(modules=masks))
    assert launched(program).split() == [f"{module}_func" for module in MODULES]
