"""What a cluster of this host is given: settings, a secret, ports, addresses, environments."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Mapping

NO_ADDRESS = "this host has only a loopback address (use two hosts, --scheduler and --role)"
OTHERS = ("DMLC_", "STEPMESH_")  # variables with roles, ranks and addresses of others


def transport_settings(transport: str) -> dict[str, str]:
    """The settings that choose a transport: all that a benchmark knows about the choice."""
    return {"FSERVER_TRANSPORT": transport, "BYTEPS_ENABLE_IPC": "0" if transport == "tcp" else "1"}


def secret() -> dict[str, str]:
    """A secret for a cluster of this host alone, unless there is one in the environment."""
    if {"FSERVER_SECRET", "FSERVER_SECRET_FILE"} & set(os.environ):
        return {}
    return {"FSERVER_SECRET": secrets.token_hex(16)}


@contextlib.contextmanager
def free_port(host: str) -> Iterator[str]:
    """A port that nobody else is given meanwhile: a socket that is bound and does not listen
    holds it, and the scheduler, which sets SO_REUSEADDR too, can listen there."""
    six = ":" in host
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield f"{f'[{host}]' if six else host}:{holder.getsockname()[1]}"


def own_address() -> str | None:
    """An IPv4 address of this host that is not loopback: the one that routes out. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes that are spawned meanwhile have in their environment."""
    given = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in given.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
