"""The code blocks of README.md and docs/*.md, and how a test runs one.

Every fenced block whose language is ``python`` or ``sh`` runs. Other languages (``text``, ``yaml``,
``c``, ...) do not; ``bash``, ``shell``, ``console`` and ``py`` are refused, so that no block
escapes by its spelling. Each block is one test, with an empty folder, at most 100 seconds, and no
settings of fserver in its environment. ``python``, ``fserver`` and ``torchrun`` are on its PATH.
Shell blocks are for bash; the first command that fails fails the test. Where the kernel permits
it (as root), a block has a network of its own with loopback alone, so fixed ports cannot collide.

**Files.** A block whose first line is a comment that starts with a file name (``# pair.py: ...``,
``// main.c``) is saved under that name, for every later block of the page. It does not run by
itself; a later block of the page has to name it (``python pair.py``, ``import pair``). A later
block of the same name replaces it.

**Several terminals, several hosts.** In a shell block, a comment line that starts with
``# terminal`` or ``# host ADDRESS`` begins a part. What stands before the first part runs first,
to its end, in the same folder; its variables do not reach the parts. Then all parts run at the
same time, each in a shell of its own, and all have to succeed. Parts of different hosts run in
network namespaces that a pair of virtual interfaces joins; each has the IPv4 address that its
comment names. ``# host ADDRESS and ADDRESS`` has two, and two such pairs, eth0 and eth1. A
block has two hosts or none. Without the right to make namespaces its test is
skipped. A part whose comment says ``Ctrl-C`` starts first; the others wait for its first line of
output, and it is interrupted when they have ended.

    # host 10.0.0.1
    fserver run --nnodes 2 --node-rank 0 --scheduler 10.0.0.1:7000 pair.py
    # host 10.0.0.2
    fserver run --nnodes 2 --node-rank 1 --scheduler 10.0.0.1:7000 pair.py

**Marks.** An HTML comment before the block, which no reader sees, changes this. A blank line may
stand in between. Values with spaces take double quotes.

    <!-- block: skip="needs a Kubernetes cluster" -->

=================  =============================================================================
skip="reason"      The block does not run. The reason is what the skipped test prints.
needs=gpu          It runs where there is a GPU. ``needs=2gpus``: where there are two.
needs=MODULE       It runs where Python has that module (``needs=ray``).
continues          It runs behind the text of the previous block of its language, in one process.
setup=NAME         Python: the text of tests/docs/setups/NAME.py is put in front of it. ``pair`` has
                   ``worker`` and ``server``, which doubles what is pushed.
expect="text"      Its output has this text. It may be given several times.
status=N           The exit status that it has to have (0).
=================  =============================================================================
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPS = Path(__file__).parent / "setups"

RUN = ("python", "sh")
MISSPELT = {"bash": "sh", "shell": "sh", "console": "sh", "zsh": "sh", "py": "python"}
MARKS = ("skip", "needs", "continues", "setup", "expect", "status")

_FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^`]*)$")
_MARK = re.compile(r"^ *<!-- block:(.*)-->$")
_FILE = re.compile(r"^(?:#|//) ([\w-]+\.\w+)(?:[:,\s]|$)")
_PART = re.compile(r"^# (?:terminal|host)\b.*$")


@dataclass
class Block:
    """A fenced block, with the marks of the comment before it."""

    page: str
    line: int  # of the fence, from 1
    language: str
    text: str
    marks: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that the block is, or an empty text."""
        found = _FILE.match(self.text)
        return found[1] if found else ""

    def mark(self, name: str) -> str:
        """The last value of a mark; empty if it is not given."""
        return self.marks.get(name, [""])[-1]


@dataclass
class Part:
    """What runs in one terminal."""

    comment: str
    text: str

    @property
    def addresses(self) -> list[str]:
        """The addresses of its host, one for each of its interfaces."""
        words = [word.rstrip(":,;") for word in self.comment.split()]
        if words[1:2] != ["host"]:
            return []
        return [words[2], words[4]] if words[3:4] == ["and"] else [words[2]]

    @property
    def host(self) -> str:
        """The first address of its host, or an empty text."""
        return self.addresses[0] if self.addresses else ""

    @property
    def interrupted(self) -> bool:
        return "Ctrl-C" in self.comment


def pages(root: Path = ROOT) -> list[Path]:
    """README.md and docs/*.md."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def _marks(text: str, where: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if name not in MARKS:
            raise ValueError(f"{where}: mark {name!r} is not one of {', '.join(MARKS)}")
        if bool(equals and value) == (name == "continues"):
            raise ValueError(f"{where}: mark {name!r} takes {'no' if equals else 'a'} value")
        found.setdefault(name, []).append(value)
    return found


def parse(text: str, page: str) -> Iterator[Block]:
    """All fenced blocks of a page.

    Raises:
        ValueError: a mark or a language is wrong, a fence has no end, or a mark is before no block.
    """
    marks, marked = {}, 0
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        where = f"{page}:{number}"
        if found := _MARK.match(line):
            marks, marked = _marks(found[1], where), number
        elif found := _FENCE.match(line):
            indent, fence, info = found.groups()
            language = info.split()[0] if info.split() else ""
            if language in MISSPELT:
                raise ValueError(f"{where}: write ```{MISSPELT[language]}, not ```{language}")
            body = []
            for _, inner in lines:
                if inner.strip().startswith(fence) and not inner.strip().strip(fence[0]):
                    break
                body.append(inner[len(indent) :] if not inner[: len(indent)].strip() else inner)
            else:
                raise ValueError(f"{where}: this fence has no end")
            yield Block(page, number, language, "\n".join(body) + "\n", marks)
            marks = {}
        elif line.strip() and marks:
            raise ValueError(f"{page}:{marked}: no fenced block follows this mark")
    if marks:
        raise ValueError(f"{page}:{marked}: no fenced block follows this mark")


def read(path: Path, root: Path = ROOT) -> list[Block]:
    """The blocks of a page, with what they continue and are set up by in front of them."""
    blocks: list[Block] = []
    last: dict[str, str] = {}
    for block in parse(path.read_text(), str(path.relative_to(root))):
        text = block.text
        if setup := block.mark("setup"):
            text = (SETUPS / f"{setup}.py").read_text() + text
        if "continues" in block.marks:
            if block.language not in last:
                raise ValueError(f"{block.name}: there is no block that it could continue")
            text = last[block.language] + text
        if not block.file:
            last[block.language] = text
        blocks.append(replace(block, text=text))
    return blocks


def runnable(blocks: list[Block]) -> list[Block]:
    """Those that are tests: not what is saved as a file, nor what another one continues."""
    return [b for b in blocks if b.language in RUN and not b.file]


def files(blocks: list[Block], until: Block) -> dict[str, str]:
    """The named blocks of the page in front of one, by name."""
    return {b.file: b.text for b in blocks if b.file and b.line <= until.line}


def unused(blocks: list[Block]) -> list[str]:
    """Named Python and shell blocks that no other block of the page names."""
    return [
        b.name
        for b in blocks
        if b.file
        and b.language in RUN
        and not any(
            re.search(rf"\b{re.escape(b.file)}\b|\bimport {b.file.partition('.')[0]}\b", o.text)
            for o in blocks
            if o.file != b.file
        )
    ]


def parts(text: str) -> tuple[str, list[Part]]:
    """What runs before, and the parts that run at the same time."""
    before: list[str] = []
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if _PART.match(line):
            found.append((line, []))
        else:
            (found[-1][1] if found else before).append(line)
    joined = [Part(comment, "\n".join(lines) + "\n") for comment, lines in found]
    return "\n".join(before) + "\n", joined


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")
