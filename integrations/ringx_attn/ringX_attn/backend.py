"""Which kernels compute the attention of a rank: RingX's names of them."""

from __future__ import annotations

import os
import reprlib
from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

from fserver.errors import ConfigError

VARIABLE = "RINGX_ATTN_BACKEND"

BACKENDS = {
    "auto": None,  # what fserver.ringx takes, or the program's own sdpa_kernel
    "portable": SDPBackend.MATH,
    "flash_attn": SDPBackend.FLASH_ATTENTION,
}


def _checked(what: str, name: object) -> str:
    if isinstance(name, str) and name in BACKENDS:
        return name
    reason = "fserver.ringx has no Triton kernel for attention: " if name == "fused" else ""
    raise ConfigError(f"ringX_attn: {what} {reprlib.repr(name)}: {reason}want one of {[*BACKENDS]}")


def set_backend(backend: str) -> None:
    """Chooses the kernels of the calls that follow, and of their backward.

    Args:
        backend: ``"auto"``: the fastest kernel of torch that takes the tensors. ``"portable"``:
            matrix products of torch, with all scores of a block in memory. ``"flash_attn"``:
            torch's own flash kernels; the package flash_attn is not used.

    Raises:
        ConfigError: there is no such backend. It is also a ``ValueError``.
    """
    global _backend
    _backend = _checked("backend", backend)


def get_backend() -> str:
    """Returns the name that was chosen last, at first that in RINGX_ATTN_BACKEND or ``"auto"``."""
    return _backend


def available_backends() -> tuple[str, ...]:
    """Returns the names for `set_backend`, without ``"auto"``."""
    return tuple(name for name in BACKENDS if name != "auto")


def kernels() -> AbstractContextManager[object]:
    """Returns the context in which a call takes the kernels that have been chosen."""
    chosen = BACKENDS[_backend]
    return nullcontext() if chosen is None else sdpa_kernel(chosen)


_backend = _checked(VARIABLE, os.environ.get(VARIABLE) or "auto")
