"""The settings of a node: those of the environment, and the arguments that take precedence."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

from fserver import _loader
from fserver.errors import ConfigError

_PREFIXES = ("DMLC_", "STEPMESH_", "STEPAF_", "BYTEPS_", "PS_", "FSERVER_")

_OF_THE_BUILD = "FSERVER_ARCHIVE"

# The settings that have an argument of their own.
VARIABLES = {
    "workers": "DMLC_NUM_WORKER",
    "servers": "DMLC_NUM_SERVER",
    "group_size": "DMLC_GROUP_SIZE",
    "node_rank": "DMLC_NODE_RANK",
    "gpu": "STEPMESH_GPU",
    "rank_offset": "DMLC_RANK_OFFSET",
    "instance": "DMLC_INSTANCE_ID",
    "host": "DMLC_NODE_HOST",
    "interface": "DMLC_INTERFACE",
    "port": "DMLC_PORT",
    "transport": "FSERVER_TRANSPORT",
    "progress": "FSERVER_PROGRESS",
    "backend": "STEPMESH_BACKEND",
    "host_scheduler": "FSERVER_HOST_SCHEDULER",
    "cluster": "FSERVER_CLUSTER",
    "secret": "FSERVER_SECRET",
    "tls": "FSERVER_TLS",
    "init_timeout": "FSERVER_INIT_TIMEOUT",
    "on_peer_lost": "FSERVER_ON_PEER_LOST",
    "rejoin_timeout": "FSERVER_REJOIN_TIMEOUT",
}


def environment() -> dict[str, str]:
    """Returns the settings in the environment of this process."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and name != _OF_THE_BUILD
    }


def inherited() -> dict[str, str]:
    """Returns what a node takes from the environment: ``environment()``, which GPUs CUDA shows, and
    the names of all other variables, without values, so that the engine sees misspelt ones.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    others = {name: "" for name in os.environ if name.isascii() and not name.startswith(_PREFIXES)}
    return {**others, **environment(), **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})}


@functools.cache
def _spellings() -> dict[str, tuple[str, ...]]:
    """Returns all names of a setting for each of them."""
    rows = json.loads(_loader.engine().settings([]))["settings"]
    names = [(row["name"], *row.get("older", ())) for row in rows]
    return {name: row for row in names for name in row}


def texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the values as the engine reads them, without those that are None.

    Raises:
        ConfigError: ``arguments`` is no mapping, or a name is no text.
    """
    if not isinstance(arguments, Mapping):
        raise ConfigError(  # the value is not shown: maybe a secret
            f"settings is a {type(arguments).__name__}, want names and values, as "
            '{"FSERVER_LOG": "warn"}'
        )
    for name in arguments:
        if not isinstance(name, str):
            raise ConfigError(f"settings has the name {name!r:.80}: want text")
    given = {name: value for name, value in arguments.items() if value is not None}
    return {n: str(int(v)) if isinstance(v, bool) else str(v) for n, v in given.items()}


def check_names(arguments: Mapping[str, str]) -> None:
    """Checks the names of arguments. A program may pass its whole environment: so names that do not
    look like a setting are accepted, and variables with the value that the environment has.

    Raises:
        ConfigError: a name is that of no setting and looks like one.
    """
    strange = [
        name
        for name, value in arguments.items()
        if name not in {*_spellings(), _OF_THE_BUILD} and os.environ.get(name) != value
    ]
    lines = [f"{name.upper()}=" for name in strange]
    unknown = json.loads(_loader.engine().settings(lines))["unknown"] if strange else ()
    meant = {row["name"]: row["nearest"] for row in unknown}
    for name in strange:
        upper = name.upper()
        near = VARIABLES.get(name) or (upper if upper in _spellings() else meant.get(upper))
        if near:
            raise ConfigError(
                f"settings has {name!r:.80}: there is no such setting (did you mean {near}? "
                "`fserver env` prints all)"
            )


# A setting of the environment that gives way to an argument for one of the others.
_GIVES_WAY = {
    "DMLC_NODE_HOST": ("DMLC_INTERFACE",),
    "DMLC_INTERFACE": ("DMLC_NODE_HOST",),
    "DMLC_LOCAL": ("DMLC_PS_ROOT_URI", "DMLC_NODE_HOST", "DMLC_INTERFACE"),
    "FSERVER_SECRET": ("FSERVER_SECRET_FILE",),
}
_LOCAL = ("127.", "::1", "localhost")

# The values of older spellings that say nothing, by setting. Of other settings only an empty value
# says nothing.
_SAYS_NOTHING = {"FSERVER_TRANSPORT": ("", "0", "off")}


def merged(arguments: Mapping[str, str]) -> dict[str, str]:
    """Returns what a node takes from arguments and from the environment. Arguments take precedence,
    also over another setting of the environment that would leave them without effect."""
    values = {**inherited(), **arguments}
    for name, value in arguments.items():  # the environment may have newer spellings of it
        row = _spellings().get(name, (name,))
        if value.strip().lower() in _SAYS_NOTHING.get(row[0], ("",)):
            continue
        for newer in row[: row.index(name)]:
            if newer not in arguments:
                values.pop(newer, None)
    for name, others in _GIVES_WAY.items():
        given = [arguments[other] for other in others if arguments.get(other)]
        if name == "DMLC_LOCAL":  # which agrees with these
            given = [at for at in given if at != "lo" and not at.lower().startswith(_LOCAL)]
        if given and name not in arguments:
            values.pop(name, None)
    return values
