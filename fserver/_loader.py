"""Loads the extension, once, when something first needs it.

Importing the package must not do it: loading the extension starts the engine's Go runtime, and
a child that is forked afterwards cannot use it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

from fserver.errors import Error

_PACKAGE = Path(__file__).resolve().parent
_lock = threading.Lock()
_module: ModuleType | None = None


class LoadError(Error, ImportError):
    """The extension is missing, or was built for another Python or torch."""


def load() -> ModuleType:
    """The module ``fserver._C``; also imports torch, whose libraries it uses.

    May be called from any thread, any number of times. Raises LoadError with the command that
    mends it.
    """
    global _module
    if _module is None:
        with _lock:
            if _module is None:
                check(_PACKAGE)
                _module = _import("fserver._C")
    return _module


def check(package: Path) -> None:
    """Raises LoadError unless the extension in this folder, a package fserver, fits this Python and
    this torch.

    Has to come before the import: under another torch, that ends in an undefined symbol at
    best.
    """
    extension = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not extension.is_file():
        here = sysconfig.get_config_var("SOABI")
        others = ", ".join(path.name for path in sorted(package.glob("_C.*.so")))
        found = f"there is {others}" if others else "it has not been built"
        raise LoadError(
            f"fserver: no extension for {here} in {package}: {found} ({_remedy(package)})"
        )
    import torch

    built_for = json.loads(extension.with_suffix(".json").read_text())["torch"]
    # The part after "+" names the CUDA that torch was built with; the extension uses none of it.
    if built_for.partition("+")[0] != torch.__version__.partition("+")[0]:
        raise LoadError(
            f"fserver: {extension} was built for torch {built_for}, "
            f"and this is torch {torch.__version__} ({_remedy(package)})"
        )


def _remedy(package: Path) -> str:
    root = package.parent
    if (root / "setup.py").is_file():
        pip = f"{sys.executable} -m pip install --no-build-isolation --no-deps -e {root}"
        return f"run `make af` in {root}, or, for the torch of this Python, `{pip}`"
    pip = f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall"
    return f"in the source tree of fserver run `{pip} .`"


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
