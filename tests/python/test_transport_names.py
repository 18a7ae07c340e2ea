"""What the code of the package says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fserver
from fserver.env import transports

BESIDE = "bench/baseline.py"  # says which transport each program in C stands beside


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and texts of the strings that are no docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value


def test_transports_are_not_named() -> None:
    """Names of transports come from the drivers, so that a new one needs no change here. UCX has
    transports of its own."""
    word = re.compile(rf"\b({'|'.join(t['name'] for t in transports())})\b")
    root = Path(fserver.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}: {text!r}"
        for path in sorted(root.rglob("*.py"))
        if path != root / BESIDE
        for line, text in literals(ast.parse(path.read_text()))
        if word.search(text) and "cuda_ipc" not in text
    ]
    assert not found
