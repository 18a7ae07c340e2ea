"""What the tests of stream channels share."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nodes import LIMIT, Cluster, together

MakeCluster = Callable[..., Cluster]
MS = LIMIT * 1e3
WAYS = ["tcp", "cma"]
COMPILER = os.environ.get("CC", "cc")

needs_compiler = pytest.mark.skipif(
    not shutil.which(COMPILER), reason=f"no C compiler ({COMPILER})"
)


def both(
    pair: Cluster,
    push: list[torch.Tensor],
    pull: list[torch.Tensor],
    back: list[torch.Tensor] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A channel between a worker and a server; ``back`` is what the server sends."""
    push_keys, pull_keys = list(range(len(push))), list(range(100, 100 + len(pull)))
    back = [torch.empty_like(t) for t in pull] if back is None else back
    options = {"timeout_ms": MS, **options}
    return tuple(
        together(
            [
                lambda: pair.worker.channel(push, push_keys, pull, pull_keys, **options),
                lambda: pair.server.channel(push_keys, back, pull_keys, **options),
            ]
        )
    )


@contextlib.contextmanager
def patient(channel: Any, timeout_ms: float) -> Iterator[None]:
    """Another ``timeout_ms`` for the calls of a channel of CPU tensors. It does not limit what the
    test expects to succeed, least of all the opening."""
    caller = channel._side._caller
    before, caller._timeout = caller._timeout, timeout_ms
    yield
    caller._timeout = before


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


class OfGpu(torch.Tensor):
    """Memory of the CPU that is said to be of another GPU than the current one."""

    device = torch.device("cuda", 1)
