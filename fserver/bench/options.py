"""The options that all benchmarks share, and what they mean."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from . import baseline, report
from .errors import BenchError

SHOWN = "(default %(default)s)"
TRANSPORTS = "tcp, cma (same host), auto: the best that there is"

MakeBaseline = Callable[[str, tuple[int, int] | None, str | None], baseline.Baseline]
"""Starts one; arguments as of Baseline."""


def parser(
    name: str,
    description: str,
    seconds: tuple[float | None, str],
    transport: str | None = "tcp",
    rounds: int | None = None,
) -> argparse.ArgumentParser:
    """A parser with the common options. `seconds`: default and meaning; `transport`: default, or
    None where the benchmark has an option of its own; `rounds`: default, for benchmarks whose
    baseline takes turns with them."""
    made = argparse.ArgumentParser(prog=f"fserver bench {name}", description=description)
    default, meaning = seconds
    made.add_argument(
        "--seconds",
        type=positive_seconds,
        default=default,
        help=f"{meaning} {SHOWN}" if default else meaning,
    )
    made.add_argument("--json", metavar="FILE", type=output, help="also write the results to FILE")
    made.add_argument(
        "--plot", metavar="FILE", type=output, help="also draw them (PNG, SVG or PDF)"
    )
    made.add_argument(
        "--cores",
        type=_cores,
        metavar="A,B",
        help="cores of workers and servers (default: the first two that we may use)",
    )
    if transport:
        made.add_argument(
            "--transport", default=transport, help=f"how bytes travel: {TRANSPORTS} {SHOWN}"
        )
    if rounds is not None:
        made.add_argument("--rounds", type=positive, default=rounds, help=f"rounds {SHOWN}")
        made.add_argument("--iters", type=positive, help="exchanges in a round, not --seconds")
        add_no_baseline(made)
    return made


def add_no_baseline(made: argparse.ArgumentParser) -> None:
    """The option that leaves the raw baseline out."""
    made.add_argument(
        "--no-baseline",
        action="store_const",
        const="--no-baseline",  # which is the reason in the rows
        help="without the raw baseline",
    )


def open_baseline(
    stack: contextlib.ExitStack,
    options: argparse.Namespace,
    way: str | None,
    cores: tuple[int, int] | None,
    where: str | None = None,
    make: MakeBaseline = baseline.Baseline,
) -> tuple[baseline.Baseline | None, dict[str, Any]]:
    """The raw baseline of a way, and what report.row is to say of it. Without a compiler, or where
    the system refuses its calls, there is none, and the rows say why."""
    if options.no_baseline:
        return None, {"missing": options.no_baseline}
    if way is None:
        return None, {"missing": "nothing raw does the same"}
    try:
        with contextlib.ExitStack() as own:
            raw = own.enter_context(make(way, cores, where))
            raw.prepare(8, 8)
            raw.measure(0, 1)
            stack.enter_context(own.pop_all())
    except BenchError as error:
        print(f"bench: no baseline: {error}", file=sys.stderr)
        return None, {"missing": str(error)}
    return raw, {"way": way}


def choose_cores(asked: tuple[int, int] | None) -> tuple[int, int] | None:
    """The cores of workers and servers; None where processes cannot be pinned."""
    if not hasattr(os, "sched_getaffinity"):
        print("bench: this system cannot pin processes: expect noise", file=sys.stderr)
        return None
    usable = sorted(os.sched_getaffinity(0))
    if asked is None:
        asked = (usable[0], usable[1 if len(usable) > 1 else 0])
    for core in asked:
        if core not in usable:
            raise BenchError(f"--cores: core {core}: want one of {_ranges(usable)}")
    if asked[0] == asked[1]:
        print(
            f"bench: both processes share core {asked[0]}: times are those of the kernel's "
            "scheduler, not of a transport",
            file=sys.stderr,
        )
    return asked


def output(text: str) -> str:
    """A file that can be written when all has been measured; until then it stays as it is."""
    folder = os.path.dirname(text) or "."
    if not text or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r}: want the name of a file")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(
            f"{text!r}: there is no folder {folder!r}: make it, or choose another file"
        )
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r}: not writable: change its permissions, or choose another file"
        )
    return text


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 or more")
    return int(text)


def positive_seconds(text: str) -> float:
    """Seconds, more than 0."""
    return _above_zero(text, "seconds")


def positive_milliseconds(text: str) -> float:
    """Milliseconds, more than 0."""
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
    """Bytes, 8 or more: so long is the number in a message."""
    try:
        count = report.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if count < 8:
        raise argparse.ArgumentTypeError(f"{text!r}: want 8 bytes or more")
    return count


def sizes(text: str) -> list[int]:
    """A list of them."""
    return [size(part) for part in text.split(",")]


def exchanges(text: str) -> list[tuple[int, int]]:
    """A list of bytes there and home: OUT:BACK, or one size for both."""
    pairs = []
    for part in text.split(","):
        out, two, back = part.partition(":")
        pairs.append((size(out), size(back if two else out)))
    return pairs


def numbers(text: str) -> list[int]:
    """Whole numbers, 1 or more, in order."""
    return sorted({positive(part) for part in text.split(",")})


def one_of(allowed: tuple[str, ...]) -> Any:
    """The type of a list of words."""

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
    """Sorted numbers, shortened: 0-3,8."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
