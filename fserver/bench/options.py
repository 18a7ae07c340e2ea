"""The options that all benchmarks share, and their types."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from . import baseline, report
from .errors import BenchError

SHOWN = "(default %(default)s)"
TRANSPORTS = "tcp, cma (inside a host), cudaipc (between GPUs), or auto (the best available)"

MakeBaseline = Callable[[str, tuple[int, int] | None, str | None], baseline.Baseline]
"""Starts a baseline. The arguments are those of Baseline."""

CHECKED = (
    "The number in every answer is checked. Between rounds, all bytes of an exchange are compared, "
    "in memory that held other values before."
)


def parser(
    name: str,
    description: str,
    seconds: tuple[float | None, str] | None,
    transport: str | None = "tcp",
    rounds: int | None = None,
) -> argparse.ArgumentParser:
    """Returns a parser with the common options.

    Args:
        name: the name of the benchmark.
        description: the description in its help.
        seconds: default and meaning of --seconds. None: the benchmark does not have it.
        transport: default of --transport. None: the benchmark adds its own option.
        rounds: default of --rounds. None: the benchmark has no baseline that takes turns with it.
    """
    made = argparse.ArgumentParser(prog=f"fserver bench {name}", description=description)
    if seconds is not None:
        default, meaning = seconds
        made.add_argument(
            "--seconds",
            type=positive_seconds,
            default=default,
            help=f"{meaning} {SHOWN}" if default else meaning,
        )
    made.add_argument(
        "--json", metavar="FILE", type=output, help="also write the results to FILE, as JSON"
    )
    made.add_argument(
        "--plot",
        metavar="FILE",
        type=output,
        help="also draw the results to FILE (.png, .svg or .pdf; needs matplotlib)",
    )
    made.add_argument(
        "--cores",
        type=_cores,
        metavar="A,B",
        help="run the workers on core A and the servers on core B (default: the first two cores "
        "that this process may use)",
    )
    if transport:
        made.add_argument(
            "--transport", default=transport, help=f"the transport: {TRANSPORTS} {SHOWN}"
        )
    if rounds is not None:
        made.add_argument(
            "--rounds", type=positive, default=rounds, help=f"number of rounds {SHOWN}"
        )
        made.add_argument(
            "--iters",
            type=positive,
            metavar="N",
            help="make N exchanges in a round, instead of --seconds",
        )
        add_no_baseline(made)
    return made


def add_no_baseline(made: argparse.ArgumentParser) -> None:
    """Adds the option that leaves the raw baseline out."""
    made.add_argument(
        "--no-baseline",
        action="store_const",
        const="--no-baseline",  # which is the reason in the rows
        help="do not run the raw baseline, which needs a C compiler",
    )


def open_baseline(
    stack: contextlib.ExitStack,
    options: argparse.Namespace,
    way: str | None,
    cores: tuple[int, int] | None,
    where: str | None = None,
    make: MakeBaseline = baseline.Baseline,
) -> tuple[baseline.Baseline | None, dict[str, Any]]:
    """Returns the raw baseline of a way, and the arguments of report.row about it. Without a
    compiler, or if the system refuses its calls, there is no baseline, and the rows say why."""
    if options.no_baseline:
        return None, {"missing": options.no_baseline}
    if way is None:
        return None, {"missing": "there is no raw program that does the same"}
    try:
        with contextlib.ExitStack() as own:
            raw = own.enter_context(make(way, cores, where))
            raw.prepare(8, 8)
            raw.measure(0, 1)
            stack.enter_context(own.pop_all())
    except BenchError as error:
        print(f"bench: there is no baseline: {error}", file=sys.stderr)
        return None, {"missing": str(error)}
    return raw, {"way": way}


def choose_cores(asked: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns the cores of workers and servers, or None if processes cannot be pinned."""
    if not hasattr(os, "sched_getaffinity"):
        print(
            "bench: this system cannot pin processes to cores, so the results will be noisy",
            file=sys.stderr,
        )
        return None
    usable = sorted(os.sched_getaffinity(0))
    if asked is None:
        asked = (usable[0], usable[1 if len(usable) > 1 else 0])
    for core in asked:
        if core not in usable:
            raise BenchError(f"--cores: core {core}: want one of {_ranges(usable)}")
    if asked[0] == asked[1]:
        print(
            f"bench: both processes share core {asked[0]}, so the times are those of the kernel's "
            "scheduler, not of a transport (give two cores with --cores)",
            file=sys.stderr,
        )
    return asked


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


def positive_seconds(text: str) -> float:
    """Returns a number of seconds, more than 0."""
    return _above_zero(text, "seconds")


def positive_milliseconds(text: str) -> float:
    """Returns a number of milliseconds, more than 0."""
    return _above_zero(text, "milliseconds")


def _above_zero(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: want {unit}, more than 0")
    return value


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


def one_of(allowed: tuple[str, ...]) -> Any:
    """Returns the type of an option that is a list of these words."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r}: want one of {', '.join(allowed)}")
        return words

    return parse


def _cores(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: want two core numbers, A,B")
    return int(parts[0]), int(parts[1])


def _ranges(numbers: list[int]) -> str:
    """Formats sorted numbers: 0-3,8."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
