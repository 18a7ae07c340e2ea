"""The public names of C++ headers.

This reads declarations only, as those of include/ps are: it knows no preprocessor but #define.
What is in a namespace `detail` or `internal`, private, or the data of a class is not public here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
MACRO = re.compile(r"#define (\w+)")
TOKEN = re.compile(r"\w+|::|[^\s\w]")
NAME = re.compile(r"[A-Za-z_]\w*\Z")
HIDDEN = {"detail", "internal"}
OPENING, CLOSING = "({[<", ")}]>"


def public_names(header: Path) -> set[str]:
    """Macros, types, functions, constants, and functions of classes. Constructors and operators
    have no name of their own."""
    text = NOISE.sub(" ", header.read_text())
    macros = set(MACRO.findall(text))
    return macros | set(_scope(TOKEN.findall(DIRECTIVE.sub("", text)), ""))


def _scope(tokens: list[str], owner: str, public: bool = True) -> Iterator[str]:
    """Names that are declared in a namespace (no owner) or in a class."""
    for head, body in _declarations(tokens):
        if head[:1] and head[0] in ("public", "private", "protected") and ":" in head:
            public = head[0] == "public"
            head = head[head.index(":") + 1 :]
        head = _without_template(head)
        if not public or not head or head[0] in ("friend", "static_assert"):
            continue
        if head[0] == "namespace":
            if not HIDDEN & set(head):
                yield from _scope(body, "")
        elif head[0] in ("class", "struct") and body:
            yield head[1]
            yield from _scope(body, head[1], head[0] == "struct")
        elif head[0] == "enum":
            yield from head[1:2]
            yield from (
                a
                for a, b in zip(body, body[1:] + [","], strict=True)
                if b in ",=" and NAME.match(a)
            )
        elif head[0] == "using":
            yield head[head.index("=") - 1] if "=" in head else head[-1]
        else:
            yield from _called(head, owner)


def _declarations(tokens: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """What comes before `;` or a body, and the body."""
    head: list[str] = []
    at = 0
    while at < len(tokens):
        if tokens[at] == "{":
            end = _end(tokens, at, "{", "}")
            yield head, tokens[at + 1 : end]
            head, at = [], end
        elif tokens[at] == "(":
            end = _end(tokens, at, "(", ")")
            head += tokens[at : end + 1]
            at = end
        elif tokens[at] == ";":
            yield head, []
            head = []
        else:
            head.append(tokens[at])
        at += 1


def _end(tokens: list[str], at: int, opening: str, closing: str) -> int:
    depth = 0
    for i in range(at, len(tokens)):
        depth += (tokens[i] == opening) - (tokens[i] == closing)
        if depth == 0:
            return i
    raise ValueError(f"{opening} has no {closing}: {' '.join(tokens[at : at + 10])}")


def _without_template(head: list[str]) -> list[str]:
    while head[:1] == ["template"]:
        head = head[_end(head, 1, "<", ">") + 1 :]
    return head


def _called(head: list[str], owner: str) -> Iterator[str]:
    """The name of a function, or of a constant of a namespace."""
    if "operator" in head or "~" in head:
        return
    before = head[: head.index("=")] if "=" in head else head
    if "(" in before:
        at = before.index("(") - 1
        if before[at] != owner and NAME.match(before[at]) and before[at - 1] != "::":
            yield before[at]
    elif not owner and "=" in head:
        yield [t for t in before if NAME.match(t)][-1]
