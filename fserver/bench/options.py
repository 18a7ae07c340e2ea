"""The options that all benchmarks share, and their types."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from . import report

# Other libraries (libraries.py).
ON_STREAMS = ("nccl", "symm", "nvshmem")  # a CUDA graph can hold their calls
ON_GPUS = (*ON_STREAMS, "nixl")
ON_CPU = ("gloo",)

OPS = ("push", "pull", "push_pull")
TRANSPORTS = "transports: values of FSERVER_TRANSPORT, which `fserver env` lists"
ROUND_BYTES = 64 << 20  # of a round without --seconds or --iters

Type = Callable[[str], Any]
# A flag, its type (bool: a switch), its default (None: nothing is shown) and its help.
Option = tuple[str, Type, Any, str]


def parser(prog: str, text: str, *options: Option, **how: Any) -> argparse.ArgumentParser:
    """A parser with this description, --json and these options; `how` is of ArgumentParser."""
    made = argparse.ArgumentParser(prog=prog, description=text, **how)
    for flag, kind, default, about in (JSON, *options):
        how = {"action": "store_true"} if kind is bool else {"type": kind, "default": default}
        made.add_argument(flag, help=f"{about} (default {default})" if default else about, **how)
    return made


def check_hosts(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program if TWO_HOSTS do not go together."""
    if bool(options.scheduler) != bool(options.role):
        made.error("--scheduler and --role: give both, or neither (one command on each host)")


def exchanges(options: argparse.Namespace, count: int) -> int:
    """Exchanges of so many bytes in a round that no time limits: as many on both of two hosts."""
    return options.iters or min(max(ROUND_BYTES // count, 10), 1000)


def wanted(parse: Type, fits: Callable[[Any], Any], want: str) -> Type:
    """The type of an option that `parse` reads. What does not fit is refused: `want` says why."""

    def of(text: str) -> Any:
        try:
            reason = ""
            if fits(value := parse(text)):
                return value
        except ValueError:
            pass
        except OSError as error:
            reason = f"{error.strerror}: "
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}want {want}")

    return of


def listed(kind: Type) -> Type:
    return lambda text: [kind(part) for part in text.split(",")]


def some_of(*allowed: str) -> Type:
    return listed(wanted(str, allowed.__contains__, f"some of {', '.join(allowed)}"))


def one_of(*allowed: str) -> Type:
    return wanted(str, allowed.__contains__, f"one of {', '.join(allowed)}")


def _bytes(text: str) -> int:
    """A number of bytes, as in "64", "4K" or "1MiB"."""
    match = re.fullmatch(r"(\d+)([KMG]?)(iB|B)?", text.strip(), re.IGNORECASE)
    return int(match[1]) * report.UNITS[match[2].upper()] if match else 0


def _created(text: str) -> str:
    open(text, "a").close()
    return text


# The number in a message has 8 bytes.
LEAST = "8 bytes or more, with K, M or G for powers of 1,024"
size = wanted(_bytes, lambda count: count >= 8, LEAST)
positive = wanted(int, lambda number: number >= 1, "a whole number, 1 or more")
above_zero = wanted(float, lambda number: 0 < number < math.inf, "a number, more than 0")
output = wanted(_created, bool, "a file that can be written")
_address = wanted(str, re.compile(r".+:\d{1,5}").fullmatch, "HOST:PORT")
JSON: Option = ("--json", output, None, "also write the results to this file, as JSON")
TWO_HOSTS: tuple[Option, ...] = (
    ("--scheduler", _address, None, "two hosts: HOST:PORT, an address of the servers' host"),
    ("--role", one_of("worker", "server"), None, "two hosts: of this host, worker or server"),
    ("--host", str, None, "two hosts: the address of this host to use"),
)
_two = wanted(lambda text: tuple(map(int, text.split(","))), lambda two: len(two) == 2, "A,B")
CORES: Option = ("--cores", _two, None, "A,B: of the workers, of the servers (default: first two)")


def exchange(text: str) -> tuple[int, int]:
    """Bytes in both directions, given as OUT:BACK or as one size."""
    out, colon, back = text.partition(":")
    return size(out), size(back if colon else out)
