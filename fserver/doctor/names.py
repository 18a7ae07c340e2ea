"""Host names and addresses."""

import socket
import threading
from typing import Any

LIMIT = 10.0  # seconds, for a name


def resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    """Returns the result of socket.getaddrinfo for TCP. Raises OSError if it takes longer than
    LIMIT, or if there is no result."""
    found: list[list[tuple[Any, ...]]] = []
    errors: list[OSError] = []

    def ask() -> None:
        try:
            flags = socket.AI_PASSIVE
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
        except (OSError, UnicodeError) as e:
            errors.append(e if isinstance(e, OSError) else OSError(0, "this is not a host name"))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LIMIT)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(0, f"no answer within {LIMIT:.0f} s")
    return found[0]


def join(host: str, port: int | str) -> str:
    """Returns HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
