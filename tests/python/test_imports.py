"""No module of fserver imports itself by way of others: not for types, and not in a function."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _names(text: str, package: list[str], modules: Container[str]) -> Iterator[str]:
    """The modules that a module of a package imports. What another one exports counts as that."""
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            home = package[: len(package) - statement.level + 1] if statement.level else []
            base = ".".join([*home, *filter(None, [statement.module])])
            for alias in statement.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules else base


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, without the packages that they are in: while a package
    is imported, its own modules name it. sources: text by path, ``"fserver/run/log.py"``."""
    paths = {tuple(path.partition(".")[0].split("/")): text for path, text in sources.items()}
    modules = {".".join(path).removesuffix(".__init__"): path for path in paths}
    return {
        module: {*_names(paths[path], list(path[:-1]), modules)} & modules.keys()
        for module, path in modules.items()
    }


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """One circle for each module that closes one: a, b and again a."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(imports[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(imports):
        visit(module, [])
    return found


SOURCES = {
    "a/__init__.py": "from a.b import f",
    "a/b.py": "def f():\n    from a import _x",
    "a/_x.pyi": "",
    "a/c.py": "from . import b, d\nif TYPE_CHECKING:\n    import os",
    "a/d/__init__.py": "",
    "a/d/e.py": "try:\n    from ..c import C\nexcept ImportError:\n    import os",
}


@pytest.mark.parametrize(
    ("changed", "want"),
    [
        ({}, []),
        ({"a/b.py": "import a.d.e"}, [["a.b", "a.d.e", "a.c", "a.b"]]),
        ({"a/d/__init__.py": "from .e import E"}, [["a.c", "a.d", "a.d.e", "a.c"]]),
        ({"a/b.py": "from . import g"}, [["a", "a.b", "a"]]),
        ({"a/b.py": "def f():\n    import a.c"}, [["a.b", "a.c", "a.b"]]),
        ({"a/d/__init__.py": "if TYPE_CHECKING:\n    import a.c"}, [["a.c", "a.d", "a.c"]]),
    ],
)
def test_circles_of_a_package(changed: dict[str, str], want: list[list[str]]) -> None:
    assert circles(graph(SOURCES | changed)) == want


def test_no_module_imports_itself() -> None:
    files = (ROOT / "fserver").rglob("*.py*")
    sources = [path for path in files if path.suffix in (".py", ".pyi")]
    imports = graph({str(path.relative_to(ROOT)): path.read_text() for path in sources})
    assert imports["fserver.worker"] >= {"fserver.handle", "fserver.node"}
    assert [" > ".join(circle) for circle in circles(imports)] == []
