"""Memory that can be shown to other processes of this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fserver import _loader

if TYPE_CHECKING:
    import torch


def empty_shared(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A CPU tensor like that of ``torch.empty``, in shared memory, filled with zeros.

    When it or any view of it is pushed to a server of this host, no bytes move: the server
    reads them where they are. To other servers it is sent as any tensor. As with any push, it
    must not be changed until the push_pull has completed: the server would see that.

    It needs no node, and is freed with the last tensor over it. It takes whole pages and a
    descriptor (``ulimit -n``), so it is for tensors that are used again, and small ones are
    best cut from a large one. A child of fork shares it with its parent.

    Args:
        size: the shape, as ints or one sequence.
        dtype: default ``torch.get_default_dtype()``.

    Raises:
        RuntimeError: the shape is negative or too large, or there is no memory or descriptor.
    """
    extension = _loader.load()
    import torch

    shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    like = torch.empty(shape, dtype=dtype, device="meta")  # type: ignore[arg-type]
    if like.nbytes == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    storage = extension.shared_bytes(like.nbytes).untyped_storage()
    return torch.empty(0, dtype=like.dtype, device="cpu").set_(
        storage, 0, like.shape, like.stride()
    )


def shared_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of ``empty_shared`` with the shape and type of another."""
    return empty_shared(*tensor.shape, dtype=tensor.dtype)
