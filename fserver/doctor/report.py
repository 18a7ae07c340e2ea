"""The report of the doctor, as text and as JSON."""

import os
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any, TextIO

WIDTH = 100
COLOURS = {"yes": 32, "no": 31, "note": 33}


@dataclass
class Check:
    """One finding. A finding of state "no" always has a remedy.

    The states are "yes" (it works), "no" (it does not), "note" (it works, but with a drawback) and
    "info".
    """

    name: str
    state: str
    text: str
    remedy: str = ""
    fatal: bool = False  # a "no" that makes the exit status 1

    def __post_init__(self) -> None:
        assert self.state != "no" or self.remedy, f"{self.name}: no remedy"

    def lines(self, width: int) -> list[tuple[str, str]]:
        """Returns the state and text of each line. Only the first line has a state."""
        word = "" if self.state == "info" else self.state
        first = f"  {word:<5}{self.name:<{width}}  "
        indent = " " * len(first)
        lines = textwrap.wrap(self.text, WIDTH, initial_indent=first, subsequent_indent=indent)
        if self.remedy:
            lines += textwrap.wrap(
                self.remedy, WIDTH, initial_indent=indent + "-> ", subsequent_indent=indent + "   "
            )
        return [(self.state if i == 0 else "", line) for i, line in enumerate(lines or [first])]


def refused(name: str, error: str, remedy: str, fatal: bool = False) -> Check:
    """A "no" for an error of the engine, which ends with its remedy in brackets; else it is
    `remedy`."""
    text, _, own = error.rpartition(" (")
    return Check(name, "no", text or error, own.rstrip(")") if text else remedy, fatal=fatal)


@dataclass
class Report:
    """Sections of findings, in the order in which they were added, and the data behind them."""

    sections: dict[str, list[Check]] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # text below a section
    data: dict[str, object] = field(default_factory=dict)  # further keys of the JSON

    def add(self, section: str, *checks: Check) -> None:
        self.sections.setdefault(section, []).extend(checks)

    @property
    def status(self) -> int:
        """The exit status: 1 if there is a fatal finding, else 0."""
        checks = [check for section in self.sections.values() for check in section]
        return int(any(check.fatal and check.state == "no" for check in checks))

    def json(self) -> dict[str, Any]:
        sections = {
            title: [
                {"name": c.name, "state": c.state, "text": c.text, "remedy": c.remedy}
                | ({"fatal": True} if c.fatal else {})
                for c in checks
            ]
            for title, checks in self.sections.items()
        }
        return {"status": self.status, "sections": sections, **self.data}

    def print(self, out: TextIO) -> None:
        colour = out.isatty() and not os.environ.get("NO_COLOR")
        for i, (title, checks) in enumerate(self.sections.items()):
            print(("\n" if i else "") + title, file=out)
            width = max([len(check.name) for check in checks if len(check.name) < 24], default=0)
            for check in checks:
                for state, line in check.lines(width):
                    if colour and state in COLOURS:
                        line = line.replace(state, f"\x1b[{COLOURS[state]}m{state}\x1b[0m", 1)
                    print(line, file=out)
            for line in self.tables.get(title, []):
                print(line, file=out)


def size(count: float) -> str:
    """Formats a number of bytes. A negative number means no limit."""
    if count < 0:
        return "unlimited"
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.4g} {units[0]}"


def say(text: str) -> None:
    """Prints a line to standard error."""
    print(f"fserver doctor: {text}", file=sys.stderr, flush=True)
