"""The command `fserver`. Each subcommand is loaded when it is used."""

import argparse
import importlib
import json
import os
import sys
from importlib import metadata

from fserver import _loader

COMMANDS = {
    "run": ("fserver.run", "start the roles of this host"),
    "demo": ("fserver.demo", "serve a language model, split into attention and FFN"),
    "bench": ("fserver.bench", "measure transports, layers, fan-in and memory; verify bytes"),
    "env": (__name__, "print every setting, its value and where that comes from"),
    "scheduler": ("fserver.run.scheduler", "be the scheduler of a cluster"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(metadata.version("fserver"))
        return 0
    if argv[0] not in COMMANDS:
        print(f"fserver: {argv[0]}: no such command\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        if argv[0] == "env":
            return _env(argv[1:])
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


def _env(argv: list[str]) -> int:
    """Prints the settings as the engine reads them, and on standard error what is wrong."""
    parser = argparse.ArgumentParser(
        prog="fserver env",
        description="Prints every setting: value, name, where the value comes from, meaning.",
    )
    parser.add_argument("--set", action="store_true", help="only those that are set")
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(argv)
    text = _loader.load().settings([f"{name}={value}" for name, value in os.environ.items()])
    found = json.loads(text)
    if options.set:
        found["settings"] = [s for s in found["settings"] if s["source"] != "default"]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print_settings(found["settings"])
        for problem in found["warnings"] + found["errors"]:
            print(problem, file=sys.stderr)
    return 0


def _print_settings(settings: list[dict]) -> None:
    section = ""
    for s in settings:
        if s["section"] != section:
            section = s["section"]
            print(f"\n{section}")
        value = s["value"] or s["default"]
        source = "" if s["source"] in ("default", s["name"]) else f" (from {s['source']})"
        mark = " " if s["source"] == "default" else "*"
        print(f"{mark} {s['name']} = {value}{source}\n      {s['meaning']}")
    print("\n* is set in the environment")
