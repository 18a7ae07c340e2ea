"""Loads the extension on first use.

``import fserver`` must not load it: the extension starts the engine's Go runtime, which does not
work in a child process that is forked afterwards.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

from fserver._torch import build, cache
from fserver.errors import Error

_PACKAGE = Path(__file__).resolve().parent
_lock = threading.Lock()
_module: ModuleType | None = None


def _renew() -> None:
    """Gives a child of fork a lock that no other thread has."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class LoadError(Error, ImportError):
    """The extension is missing, damaged or for another Python, or has no adapter for this torch."""


def engine() -> ModuleType:
    """Returns the module ``fserver._C``, and does not import torch. Until ``load`` has connected it
    to torch, the module has Scheduler and the functions of ``fserver env`` and ``fserver doctor``.

    Any thread may call it, any number of times.

    Raises:
        LoadError: the extension cannot be loaded. The text has the command that repairs it.
    """
    with _lock:
        check(_PACKAGE)
        return _import("fserver._C")


def load() -> ModuleType:
    """Returns the module ``fserver._C``, connected to the torch of this process. Imports torch.

    Raises:
        LoadError: the extension cannot be loaded. The text has the command that repairs it.
        Error: this process was forked after the engine had been started.
    """
    global _module
    if _module is None:
        with _lock:
            if _module is None:
                check(_PACKAGE)
                if running := sys.modules.get("fserver._C"):
                    running.enter()  # rather than import torch first
                adapter = _adapter()
                module = _import("fserver._C")
                try:
                    _join(module, adapter)
                except LoadError:  # a compiled one may be of another container with this home
                    given = _given(_torch()[1])
                    if given == adapter or not given.is_file():
                        raise
                    _join(module, given)
                _module = module
    return _module


def check(package: Path) -> None:
    """Raises LoadError if the package in this folder has no extension for this Python."""
    extension = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not extension.is_file():
        here = sysconfig.get_config_var("SOABI")
        others = ", ".join(path.name for path in sorted(package.glob("_C.*.so")))
        found = f"it has only {others}" if others else "it has not been built"
        raise LoadError(
            f"fserver: {package} has no extension for {here}: {found} ({_remedy(package)})"
        )


def _remedy(package: Path) -> str:
    root = package.parent
    if (root / "setup.py").is_file():
        pip = f"{sys.executable} -m pip install --no-deps -e {root}"
        return f"run `make af` in {root}, or, for this Python, `{pip}`"
    wheel = "the wheel of fserver for this Python"
    return f"run `{sys.executable} -m pip install --no-deps --force-reinstall` with {wheel}"


def _adapter() -> Path:
    """Returns the adapter for the torch of this Python: one that was compiled for exactly this
    torch, else the package's adapter for its minor version, else one that is compiled now."""
    torch, version = _torch()
    made = cache.path(version)
    if made and os.path.isfile(made):  # false if the folder may not be searched
        return made
    given = _given(version)
    if given.is_file():
        return given
    try:
        return cache.compiled(version, Path(str(torch.__file__)).parent)
    except cache.CompileError as error:
        raise LoadError(
            f"fserver has {_adapters()}, but torch {version} is installed: {error}"
        ) from None


def _given(version: str) -> Path:
    """Returns the path of the package's adapter for a version of torch, which need not exist."""
    return _PACKAGE / "_torch" / build.file_name(version)


def _torch() -> tuple[ModuleType, str]:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise unusable(None, error) from error
        raise LoadError(
            f"fserver needs torch {build.LEAST} or later, but torch is not installed (run `{_PIP}`)"
        ) from error
    except Exception as error:
        raise unusable(None, error) from error
    version = str(getattr(torch, "__version__", ""))
    if not _VERSION.match(version) or build.minor(version) < build.MIN_TORCH:
        raise unusable(torch)
    for name in _NEEDED:
        if not hasattr(torch, name):
            raise unusable(torch, AttributeError(f"it has no torch.{name}"))
    return torch, version


_PIP = f"{sys.executable} -m pip install 'torch>={build.LEAST}'"
_VERSION = re.compile(r"\d+\.\d+")
_NEEDED = ("Tensor", "library", "utils")  # what a torch has whose installation is whole


def unusable(torch: ModuleType | None, error: Exception | None = None) -> LoadError:
    """Returns the error for a torch that fserver cannot use.

    Args:
        torch: the module. None: its import failed.
        error: what failed.
    """
    again = _PIP.replace("install", "install --force-reinstall", 1)
    if torch is None:
        return LoadError(
            f"fserver needs torch, but importing torch fails: {_line(error)} (run `{again}`)"
        )
    version = str(getattr(torch, "__version__", ""))
    where = getattr(torch, "__file__", None) or ", ".join(getattr(torch, "__path__", []))
    if not _VERSION.match(version):
        return LoadError(
            f"fserver needs torch {build.LEAST} or later, but {where}, which Python imports as "
            f"torch, has no version: it is not PyTorch (rename it, or run `{again}`)"
        )
    if build.minor(version) < build.MIN_TORCH:
        return LoadError(
            f"fserver needs torch {build.LEAST} or later, but torch {version} is installed (run "
            f"`{_PIP}`)"
        )
    return LoadError(
        f"fserver: the installation of torch {version} in {where} is damaged: {_line(error)} (run "
        f"`{again}`)"
    )


def _line(error: Exception | None) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, AttributeError) else f"{type(error).__name__}: {text}"


def _adapters() -> str:
    """Returns "adapters for torch 2.11, 2.15": the package's adapters for this Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = (path.name for path in (_PACKAGE / "_torch").glob(f"*{suffix}"))
    found = sorted(build.minor(name.removesuffix(suffix).replace("_", ".")) for name in names)
    return "adapters for torch " + (", ".join(f"{a}.{b}" for a, b in found) or "none")


def _join(module: ModuleType, adapter: Path) -> None:
    """Connects the extension to an adapter, and checks that the adapter reads a tensor correctly.

    The adapter's inlined code contains the memory layout of a tensor. If the layout has changed, no
    symbol is missing: only the values are wrong.
    """
    torch, version = _torch()
    with torch.utils._python_dispatch._disable_current_modes():
        tensor = torch.arange(24, dtype=torch.int16, device="cpu")[4:16].view(3, 4)
        storage = tensor.untyped_storage()
        facts = (
            *(tensor._cdata, storage._cdata, tensor.data_ptr(), storage.data_ptr()),
            *(storage.nbytes(), tensor.storage_offset(), tensor.element_size()),
            *(tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)),
        )
    try:
        module.join(str(adapter), tensor, facts)
    except ImportError as error:
        raise LoadError(
            f"fserver: the adapter {adapter} does not fit torch {version}: {error} "
            f"(run `{sys.executable} -m fserver._torch` to compile an adapter for this torch)"
        ) from None


def _import(name: str) -> ModuleType:
    """Imports an extension with lazy binding.

    The engine binds the functions of optional libraries when it first calls them. Python's default
    is to bind all functions at import, which fails if such a library is missing.
    """
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("LD_BIND_NOW"):
            raise LoadError(
                f"fserver: the extension needs lazy binding, but LD_BIND_NOW is set: {error} "
                "(unset LD_BIND_NOW)"
            ) from error
        raise LoadError(
            f"fserver: the extension cannot be loaded: {error} ({_remedy(_PACKAGE)})"
        ) from error
    finally:
        sys.setdlopenflags(flags)
