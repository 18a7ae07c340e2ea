"""Runs something once torch has been imported, without importing it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_torch(call: Callable[[ModuleType], None]) -> None:
    """Calls ``call(torch)``: now if torch has been imported, else at the end of its first import
    that succeeds."""
    if sys.modules.get("torch") is not None:
        call(importlib.import_module("torch"))  # waits for a thread that is importing it
    else:
        sys.meta_path.insert(0, _Finder(call))


class _Finder(MetaPathFinder):
    """Finds torch where the other finders do, and has its import end in a call."""

    def __init__(self, call: Callable[[ModuleType], None]) -> None:
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    self._extend(spec.loader)
                return spec
        return None

    def _extend(self, loader: object) -> None:
        """Only this loader, which is of this import, does more than it did."""
        load = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[attr-defined]
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._call(module)

        loader.exec_module = exec_module  # type: ignore[attr-defined]
