"""What a spawned process finds: its environment and its sys.path."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

BY_THE_BYTE = {
    "GODEBUG": ("memprofilerate=1", ","),
    "GLIBC_TUNABLES": ("glibc.malloc.tcache_count=0", ":"),
}


def by_the_byte() -> contextlib.AbstractContextManager[None]:
    """In processes that are spawned meanwhile `peers.in_use` is exact: the engine records each of
    its allocations, and malloc keeps nothing back for a thread, which it would count as in use."""
    return environment(
        {
            name: between.join(filter(None, (os.environ.get(name), setting)))
            for name, (setting, between) in BY_THE_BYTE.items()
        }
    )


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes that are spawned meanwhile have in their environment."""
    given = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in given.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """In processes that are spawned meanwhile, sys.path begins with this folder."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
