"""`fserver env`: every setting, its value, where it comes from and what it means."""

import argparse
import json
import sys
import textwrap
from collections.abc import Set
from typing import Any

from fserver import _loader
from fserver.errors import ConfigError
from fserver.settings import check_names, merged

WIDTH = 100


def main(argv: list[str]) -> int:
    """Prints the settings as the engine reads them, and on standard error what is wrong.

    Returns 1 if these settings cannot start a node. Where they give no role they describe none, and
    what a node needs may be missing.
    """
    parser = argparse.ArgumentParser(
        prog="fserver env",
        description="Prints every setting: name, value, where the value comes from, and meaning. "
        "The exit status is 1 if a value is not allowed. If DMLC_ROLE is set, the exit "
        "status is also 1 if a setting that the role needs is missing.",
    )
    parser.add_argument("--set", action="store_true", help="print only the settings that are set")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="NAME=VALUE",
        help="use this value instead of the environment's",
    )
    options = parser.parse_args(argv)
    for argument in options.arguments:
        if "=" not in argument:
            parser.error("an argument has no '=': want NAME=VALUE")  # not shown: maybe a secret
    arguments = dict(argument.split("=", 1) for argument in options.arguments)
    found = settings(merged(arguments), set(arguments))
    warned = {name["name"] for name in found["unknown"]}
    try:
        check_names({name: v for name, v in arguments.items() if name not in warned})
    except ConfigError as error:
        parser.error(str(error))
    of = {s["name"]: s for s in found["settings"]}
    if of["DMLC_ROLE"]["origin"] == "default":
        missing = found["missing"]
        found["errors"] = [error for error in found["errors"] if error not in missing]
        found["missing"] = []
    status = 1 if found["errors"] else 0
    if options.set:
        found["settings"] = [s for s in found["settings"] if s["origin"] != "default"]
    if options.json:
        print(json.dumps(found, indent=1))
        return status
    print(table(found["settings"]))
    for problem in found["warnings"] + found["errors"]:
        print(problem, file=sys.stderr)
    return status


def settings(values: dict[str, str], arguments: Set[str] = frozenset()) -> dict[str, Any]:
    """What the engine makes of these values; docs/settings.md has the names.

    Keys: ``settings`` (each with ``name``, ``value``, ``default``, ``origin``, ``source``,
    ``meaning``, ...), ``unknown`` (names that look like settings, each with the ``nearest``
    known one), ``warnings``, ``errors``, ``missing`` (the errors that only say that a setting is
    not given). ``origin`` is ``"argument"`` for names in arguments,
    ``"environment"`` for others that are given, else ``"default"``. The value of a secret is
    ``"set"``.

    Raises LoadError where there is no engine.
    """
    found: dict[str, Any] = json.loads(
        _loader.engine().settings([f"{n}={v}" for n, v in values.items()])
    )
    for s in found["settings"]:
        if s["source"] == "default":
            s["origin"] = "default"
        else:
            s["origin"] = "argument" if s["source"] in arguments else "environment"
    return found


def transports() -> list[dict[str, Any]]:
    """The transports of this build, the best first; the last one reaches every peer.

    Keys: ``name``, ``over`` (the transport whose connections it uses, or empty), ``inside``
    (whether it reaches processes of this host only), ``findings`` (what `fserver doctor` prints).

    Raises LoadError where there is no engine.
    """
    found: list[dict[str, Any]] = json.loads(_loader.engine().host([]))["transports"]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The settings as text of at most 100 columns."""
    lines = []
    section = ""
    for s in rows:
        if s["section"] != section:
            section = s["section"]
            lines += ["", section]
        value = s["value"] or s["default"]
        origin = s["origin"]
        if s["source"] not in ("default", s["name"]):
            origin += f", as {s['source']}"
        mark = " " if s["origin"] == "default" else "*"
        first = f"{mark} {s['name']:<30} "
        text = f"{value}  ({origin})"
        indent = " " * len(first)
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent)
        about = s["meaning"]
        if s.get("takes_effect_with"):
            about += f" (takes effect with: {s['takes_effect_with']})"
        lines += textwrap.wrap(about, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, "", "* is set"]).lstrip("\n")
