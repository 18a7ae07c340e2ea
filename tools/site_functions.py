"""An extension of griffe, which reads the docstrings for the site. Griffe reads source text, so it
sees functions that a call returns as plain values. This extension takes them from the module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
MADE = "fserver.ringx.api"


class MadeFunctions(griffe.Extension):
    """Documents the functions with RingX's arguments, which one function of fserver makes."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.path != MADE:
            return
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        importlib.import_module(MADE)  # griffe imports with a path on which there is no torch
        imported = griffe.inspect(MADE, filepath=mod.filepath)
        for name, value in list(mod.members.items()):
            made = imported.members.get(name)
            if not value.is_alias and value.is_attribute and made is not None and made.is_function:
                mod.set_member(name, made)
