"""Loads the extension, once, when something first needs it.

Importing the package must not do it: loading the extension starts the engine's Go runtime, and
a child that is forked afterwards cannot use it.
"""

from __future__ import annotations

import importlib
import os
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


class LoadError(Error, ImportError):
    """The extension is missing or is for another Python, or it has no adapter to this torch."""


def load() -> ModuleType:
    """The module ``fserver._C``, joined to the torch of this process, which is imported.

    May be called from any thread, any number of times. Raises LoadError with the command that
    mends it.
    """
    global _module
    if _module is None:
        with _lock:
            if _module is None:
                check(_PACKAGE)
                adapter = _adapter()
                module = _import("fserver._C")
                _join(module, adapter)
                _module = module
    return _module


def check(package: Path) -> None:
    """Raises LoadError unless this folder, a package fserver, has an extension for this Python."""
    extension = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not extension.is_file():
        here = sysconfig.get_config_var("SOABI")
        others = ", ".join(path.name for path in sorted(package.glob("_C.*.so")))
        found = f"there is {others}" if others else "it has not been built"
        raise LoadError(
            f"fserver: no extension for {here} in {package}: {found} ({_remedy(package)})"
        )


def _remedy(package: Path) -> str:
    root = package.parent
    if (root / "setup.py").is_file():
        pip = f"{sys.executable} -m pip install --no-build-isolation --no-deps -e {root}"
        return f"run `make af` in {root}, or, for this Python, `{pip}`"
    return f"run `{sys.executable} -m pip install --no-deps --force-reinstall fserver`"


def _adapter() -> Path:
    """The adapter for the torch of this Python: compiled for exactly this torch before, or the
    package's for its minor version, or compiled now."""
    torch, version = _torch()
    made = cache.path(version)
    if made.is_file():
        return made
    given = _PACKAGE / "_torch" / build.file_name(version)
    if given.is_file():
        return given
    try:
        return cache.compiled(version, Path(str(torch.__file__)).parent)
    except cache.CompileError as error:
        raise LoadError(
            f"fserver has {_adapters()}, and this is torch {version}: {error}"
        ) from None


def _torch() -> tuple[ModuleType, str]:
    pip = f"{sys.executable} -m pip install 'torch>={build.LEAST}'"
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise LoadError(
            f"fserver needs torch {build.LEAST} or later, and this Python has none (run `{pip}`)"
        ) from error
    version = str(torch.__version__)
    if build.minor(version) < build.MIN_TORCH:
        raise LoadError(
            f"fserver needs torch {build.LEAST} or later, and this is torch {version} (run `{pip}`)"
        )
    return torch, version


def _adapters() -> str:
    """ "adapters for torch 2.11, 2.15": of this package, for this Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = (path.name for path in (_PACKAGE / "_torch").glob(f"*{suffix}"))
    found = sorted(build.minor(name.removesuffix(suffix).replace("_", ".")) for name in names)
    return "adapters for torch " + (", ".join(f"{a}.{b}" for a, b in found) or "none")


def _join(module: ModuleType, adapter: Path) -> None:
    """Joins the extension to an adapter, which must read a tensor as Python does.

    The adapter's inlined code knows where torch keeps the fields of a tensor. If it is wrong, no
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
            f"fserver: {adapter} does not fit torch {version}: {error} "
            f"(run `{sys.executable} -m fserver._torch`, which compiles one for this torch)"
        ) from None


def _import(name: str) -> ModuleType:
    """Imports an extension with lazy binding.

    The engine's bindings to libraries that may be missing here leave their functions undefined
    until they are called; Python would ask for all of them now.
    """
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("LD_BIND_NOW"):
            raise LoadError(f"{error} (unset LD_BIND_NOW: the extension binds lazily)") from error
        raise
    finally:
        sys.setdlopenflags(flags)
