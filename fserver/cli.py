"""The command `fserver`. Each subcommand is loaded when it is used."""

import importlib
import os
import sys

from fserver import versions
from fserver.errors import Error

COMMANDS = {
    "run": ("fserver.run", "start the scheduler, servers and workers of this host"),
    "demo": ("fserver.demo", "run a language model, split into attention and FFN"),
    "bench": ("fserver.bench", "measure speed and memory use, and verify data"),
    "doctor": ("fserver.doctor", "report what works on this host, and how to fix what does not"),
    "env": ("fserver.env", "print every setting, with its value, origin and meaning"),
    "config": ("fserver.config", "print how to compile and link programs in C and C++"),
    "scheduler": ("fserver.run.scheduler", "run the scheduler of a cluster"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(versions.text())
        return 0
    if argv[0] not in COMMANDS:
        print(f"fserver: no such command: {argv[0]}\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))
    except Error as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads the output any more, as in `fserver env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _help() -> str:
    lines = ["usage: fserver COMMAND [options]      (fserver COMMAND --help shows the options)", ""]
    lines += [f"  {name:<11}{text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "  --version  print the versions of all parts of this build"]
    return "\n".join(lines)
