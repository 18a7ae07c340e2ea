"""The command `fserver`. Each subcommand is loaded when it is used."""

import importlib
import os
import sys

from fserver import _loader, versions

COMMANDS = {
    "run": ("fserver.run", "start the roles of this host"),
    "demo": ("fserver.demo", "serve a language model, split into attention and FFN"),
    "bench": ("fserver.bench", "measure transports, layers, fan-in and memory; verify bytes"),
    "doctor": ("fserver.doctor", "say what works on this host, what does not, and what to do"),
    "env": ("fserver.env", "print every setting, its value, where that comes from, its meaning"),
    "scheduler": ("fserver.run.scheduler", "be the scheduler of a cluster"),
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
        print(f"fserver: {argv[0]}: no such command\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    except _loader.LoadError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads the output any more, as in `fserver env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _help() -> str:
    lines = ["usage: fserver COMMAND [options]      (fserver COMMAND --help says more)", ""]
    lines += [f"  {name:<11}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(lines)
