"""Makes RingX's functions of those of `fserver.ringx`, which have the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

try:
    import fserver.ringx
except ModuleNotFoundError as error:
    if error.name not in ("fserver", "fserver.ringx"):
        raise
    raise ImportError(
        f"ringX_attn needs fserver: {error} (run pip install with the folder of the repository "
        "that integrations/ringx_attn is in, or with its wheel; PyPI's fserver is another program)"
    ) from error

from .backend import kernels


def make(algorithm: str, module: str, name: str | None = None) -> Callable[..., Any]:
    """Returns the function of an algorithm, with the kernels that `set_backend` has chosen.

    Args:
        algorithm: RingX's name of it, ``"X1"`` to ``"X4o"``.
        module: the module in which the function is found.
        name: the name of the function. None: that of the algorithm.
    """
    theirs = f"ring{algorithm}_attn_func"
    compute = getattr(fserver.ringx, theirs)

    @wraps(compute)
    def function(*args: Any, **options: Any) -> Any:
        with kernels():
            return compute(*args, **options)

    function.__module__ = module
    function.__name__ = function.__qualname__ = name or theirs
    return function
