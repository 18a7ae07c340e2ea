"""What `fserver --version` prints."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import fserver
from fserver import _loader


def text() -> str:
    """The versions of all that makes up this installation, one a line.

    Loads the engine, which knows its own. Where it cannot be loaded, a line says why.
    """
    lines = [("fserver", fserver.__version__), *_engine(), ("torch", torch())]
    return "\n".join(f"{name:<9}{value}" for name, value in lines)


def _engine() -> list[tuple[str, str]]:
    try:
        extension = _loader.engine()
    except ImportError as error:
        return [("engine", f"cannot be loaded: {error}")]
    about = json.loads(extension.host([]))["engine"]
    return [
        ("engine", about["version"]),
        ("ABI", str(extension.abi)),
        ("wire", str(about["wire"])),
        ("Go", about["go"].removeprefix("go")),
        ("commit", commit(Path(str(extension.__file__)).parent)),
    ]


def commit(package: Path) -> str:
    """The commit that a package fserver was built from, which tools/builder.py notes in it."""
    noted = (package / "_commit").read_text().strip()
    return "unknown: built from sources without git" if noted == "unknown" else noted


def torch() -> str:
    """The version of torch. It is read from a file, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed"
    path = str(Path(spec.origin).with_name("version.py"))
    try:
        return str(runpy.run_path(path)["__version__"])
    except Exception as error:  # it may be any file
        return f"unknown: {path} has no version: {error!r}"
