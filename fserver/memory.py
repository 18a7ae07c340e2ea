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
    """Returns a CPU tensor in shared memory, filled with zeros.

    When the tensor, or a view of it, is pushed to a server of this host, no bytes move: the server
    reads them where they are. To other servers it is sent as any tensor. As with any push, do not
    change it until the push_pull has completed.

    It needs no node, and its memory is freed with the last tensor over it. It takes whole pages and
    a descriptor (``ulimit -n``), so use it for tensors that are used again, and cut small tensors
    from a large one. A child of fork shares it with its parent.

    Args:
        size: the shape, as ints or one sequence.
        dtype: the type; None: ``torch.get_default_dtype()``.

    Raises:
        RuntimeError: the shape is negative or too large, or memory or descriptors are exhausted.

    Example:
        ```python
        x = fserver.empty_shared(128, 512, dtype=torch.bfloat16)
        worker.push_pull([x], [0], [y], [0])  # to a server of this host by reference
        ```
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
    """Returns a tensor of ``empty_shared`` with the shape and dtype of another tensor.

    Args:
        tensor: any tensor. Its contents are not copied.
    """
    return empty_shared(*tensor.shape, dtype=tensor.dtype)
