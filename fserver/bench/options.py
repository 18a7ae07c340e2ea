"""The options that all benchmarks share, and their types."""

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

from . import report

TRANSPORTS = "tcp, cma (inside a host), cudaipc (between GPUs), or auto (the best available)"
CHECKED = (
    "The number in every answer is checked. Between rounds, all bytes of an exchange are compared, "
    "in memory that held other values before."
)
PLACES = ("local", "remote", "joint")
ROLES = ("worker", "server")
VALUES = {  # of options, in their help, by type; else a list
    "str": "NAME",
    "output": "FILE",
    "_cores": "A,B",
    "positive": "N",
    "size": "BYTES",
    "seconds": "SECONDS",
    "milliseconds": "MS",
    "checkout": "DIR",
}

Option = tuple[str, Callable[[str], Any] | tuple[str, ...], Any, str]
"""A flag, its type or the words that it allows, its default (None: nothing is shown) and its help.
A type that is `bool` makes a switch."""


TWO_HOSTS: tuple[Option, ...] = (
    ("--scheduler", str, None, "two hosts: HOST:PORT, an address of the servers' host"),
    ("--role", ROLES, None, "two hosts: the role of this host"),
    ("--host", str, None, "two hosts: the address of this host to use"),
)


def parser(name: str, text: str, *options: Option, rounds: int | None = None) -> "Parser":
    """Returns the parser of a benchmark: with these options and those that all have.

    Args:
        name: the name of the benchmark.
        text: the description in its help.
        options: its own.
        rounds: default of --rounds. None: nothing takes turns with a raw baseline.
    """
    made = Parser(prog=f"fserver bench {name}", description=text)
    made.option("--json", output, None, "also write the results to this file, as JSON")
    core = "run the workers on core A and the servers on core B (default: the first two)"
    made.option("--cores", _cores, None, core)
    if rounds is not None:
        made.option("--rounds", positive, rounds, "number of rounds")
        made.option("--iters", positive, None, "exchanges in a round, instead of --seconds")
        made.option("--no-baseline", bool, False, "no raw baseline, which needs a C compiler")
    for option in options:
        made.option(*option)
    return made


class Parser(argparse.ArgumentParser):
    """A parser whose options are rows."""

    def option(self, flag: str, kind: Any, default: Any, text: str) -> None:
        """Adds an option; see Option."""
        if kind is bool:
            self.add_argument(flag, action="store_true", help=text)
            return
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if default is not None:
            text += f" (default {default})"
        unit = None if "choices" in how else VALUES.get(getattr(kind, "__name__", ""), "LIST")
        self.add_argument(flag, default=default, help=text, metavar=unit, **how)


def seconds_of(default: float | None, text: str = "approximate length of a round") -> Option:
    """The option --seconds."""
    return "--seconds", seconds, default, text


def transport_of(default: str) -> Option:
    """The option --transport."""
    return "--transport", str, default, f"the transport: {TRANSPORTS}"


def check_hosts(made: Parser, options: argparse.Namespace) -> None:
    """Ends the program if TWO_HOSTS do not go together."""
    if bool(options.scheduler) != bool(options.role):
        made.error(
            "--scheduler and --role: give both, or neither (run one command on each of two hosts)"
        )
    if options.scheduler and not re.fullmatch(r".+:\d{1,5}", options.scheduler):
        made.error(f"--scheduler {options.scheduler}: want HOST:PORT")


def output(text: str) -> str:
    """Returns the name of a file after checking that it can be written at the end."""
    folder = os.path.dirname(text) or "."
    if not text or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r}: want the name of a file")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(
            f"{text!r}: the folder {folder!r} does not exist: create it, or give another file"
        )
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r}: not writable: change its permissions, or give another file"
        )
    return text


def positive(text: str) -> int:
    """Returns a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 or more")
    return int(text)


def seconds(text: str, unit: str = "seconds") -> float:
    """Returns a number of seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: want {unit}, more than 0")
    return value


def milliseconds(text: str) -> float:
    """Returns a number of milliseconds, more than 0."""
    return seconds(text, "milliseconds")


def size(text: str) -> int:
    """Returns a number of bytes, 8 or more. The number in a message has 8 bytes."""
    try:
        count = report.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if count < 8:
        raise argparse.ArgumentTypeError(f"{text!r}: want 8 bytes or more")
    return count


def sizes(text: str) -> list[int]:
    """Returns a list of sizes."""
    return [size(part) for part in text.split(",")]


def exchanges(text: str) -> list[tuple[int, int]]:
    """Returns a list of bytes in both directions, each given as OUT:BACK or as one size."""
    pairs = []
    for part in text.split(","):
        out, two, back = part.partition(":")
        pairs.append((size(out), size(back if two else out)))
    return pairs


def numbers(text: str) -> list[int]:
    """Returns a sorted list of whole numbers, 1 or more."""
    return sorted({positive(part) for part in text.split(",")})


def names(text: str) -> list[str]:
    """Returns a list of words."""
    return text.split(",")


def some_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Returns the type of an option that is a list of these words."""

    def words(text: str) -> list[str]:
        found = text.split(",")
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r}: want some of {', '.join(allowed)}")
        return found

    return words


def _cores(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: want two core numbers, A,B")
    return int(parts[0]), int(parts[1])
