"""The options that all benchmarks share, and their types."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from . import report

# Other libraries (libraries.py).
ON_STREAMS = ("nccl", "symm", "nvshmem")  # a CUDA graph can hold their calls
ON_GPUS = (*ON_STREAMS, "nixl")
ON_CPU = ("gloo",)

TRANSPORTS = "tcp, cma (inside a host), cudaipc (between GPUs), or auto (the best available)"
CHECKED = (
    "The number in every answer is checked. Between rounds, all bytes of an exchange are compared, "
    "in memory that held other values before."
)
PLACES = ("local", "remote", "joint")

Option = tuple[str, Callable[[str], Any] | tuple[str, ...], Any, str]
"""A flag, its type or the words that it allows, its default (None: nothing is shown) and its help.
A type that is `bool` makes a switch."""

TWO_HOSTS: tuple[Option, ...] = (
    ("--scheduler", str, None, "two hosts: HOST:PORT, an address of the servers' host"),
    ("--role", ("worker", "server"), None, "two hosts: the role of this host"),
    ("--host", str, None, "two hosts: the address of this host to use"),
)


class Parser(argparse.ArgumentParser):
    """A parser whose options are rows."""

    def option(self, flag: str, kind: Any, default: Any, text: str) -> None:
        if kind is bool:
            self.add_argument(flag, action="store_true", help=text)
            return
        how = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if default is not None:
            text += f" (default {default})"
        self.add_argument(flag, default=default, help=text, **how)


def parser(name: str, text: str, *options: Option, rounds: int | None = None) -> Parser:
    """The parser of a benchmark, with this description, these options and those that all have.
    `rounds` is the default of --rounds. None: nothing takes turns with a raw baseline."""
    made = Parser(prog=f"fserver bench {name}", description=text)
    made.option("--json", output, None, "also write the results to this file, as JSON")
    core = "A,B: run the workers on core A and the servers on core B (default: the first two)"
    made.option("--cores", _cores, None, core)
    if rounds is not None:
        made.option("--rounds", positive, rounds, "number of rounds")
        made.option("--iters", positive, None, "exchanges in a round, instead of --seconds")
        made.option("--no-baseline", bool, False, "no raw baseline, which needs a C compiler")
    for option in options:
        made.option(*option)
    return made


def seconds_of(default: float | None, text: str = "approximate length of a round") -> Option:
    return "--seconds", seconds, default, text


def transport_of(default: str) -> Option:
    return "--transport", str, default, f"the transport: {TRANSPORTS}"


def check_hosts(made: Parser, options: argparse.Namespace) -> None:
    """Ends the program if TWO_HOSTS do not go together."""
    if bool(options.scheduler) != bool(options.role):
        made.error("--scheduler and --role: give both, or neither (one command on each host)")
    if options.scheduler and not re.fullmatch(r".+:\d{1,5}", options.scheduler):
        made.error(f"--scheduler {options.scheduler}: want HOST:PORT")


def output(text: str) -> str:
    """The name of a file that can be written; creates it."""
    try:
        with open(text, "a"):
            return text
    except OSError as error:
        why = f"{text!r}: {error.strerror}: want a file that can be written"
        raise argparse.ArgumentTypeError(why) from None


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 or more")
    return int(text)


def seconds(text: str, unit: str = "seconds") -> float:
    """A number, more than 0."""
    if not re.fullmatch(r"\d*\.?\d+", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: want {unit}, more than 0")
    return float(text)


def milliseconds(text: str) -> float:
    return seconds(text, "milliseconds")


def size(text: str) -> int:
    """A number of bytes, as in "64", "4K" or "1MiB". The number in a message has 8 bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)(iB|B)?", text.strip(), re.IGNORECASE)
    count = int(match[1]) * report.UNITS[match[2].upper()] if match else 0
    if count < 8:
        raise argparse.ArgumentTypeError(
            f"{text!r}: want 8 bytes or more, with K, M or G for powers of 1,024"
        )
    return count


def sizes(text: str) -> list[int]:
    return [size(part) for part in text.split(",")]


def exchanges(text: str) -> list[tuple[int, int]]:
    """A list of bytes in both directions, each given as OUT:BACK or as one size."""
    parts = [part.split(":", 1) for part in text.split(",")]
    return [(size(part[0]), size(part[-1])) for part in parts]


def numbers(text: str) -> list[int]:
    """A sorted list of whole numbers, 1 or more."""
    return sorted({positive(part) for part in text.split(",")})


def names(text: str) -> list[str]:
    return text.split(",")


def some_of(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """The type of an option that is a list of these words."""

    def words(text: str) -> list[str]:
        for word in text.split(","):
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r}: want some of {', '.join(allowed)}")
        return text.split(",")

    return words


def _cores(text: str) -> tuple[int, int]:
    found = [int(core) for core in re.findall(r"\d+", text)]
    if len(found) != 2:
        raise argparse.ArgumentTypeError(f"{text!r}: want two core numbers, A,B")
    return found[0], found[1]
