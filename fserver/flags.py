"""Flags that CUDA streams write and wait for, and pinned memory as a GPU sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fserver import _loader

if TYPE_CHECKING:
    from torch import Tensor


def map_pinned_tensor(tensor: Tensor, device_index: int) -> Tensor:
    """Returns the memory of a pinned host tensor as a tensor of a GPU, without a copy.

    The result keeps the memory alive.

    Args:
        tensor: a contiguous CPU tensor in pinned memory.
        device_index: the GPU, as CUDA counts.

    Raises:
        ConfigError: the tensor is not contiguous or not on the CPU.
        Error: the tensor is not pinned.

    Example:
        ```python
        flag = torch.zeros(1, dtype=torch.int64).pin_memory()
        seen = f.map_pinned_tensor(flag, 0)  # on cuda:0, over the same memory
        ```
    """
    mapped: Tensor = _loader.load().map_pinned_tensor(tensor, device_index)
    return mapped


def write_flag(flag: Tensor, seq: Tensor) -> None:
    """Writes ``seq`` to ``flag`` on the current CUDA stream, after what is queued there.

    The call can be captured into a CUDA graph. The memory of both tensors is kept until the stream
    has passed, or as long as the graph exists.

    Args:
        flag: one int64, on the GPU or in pinned memory.
        seq: one int64, on the GPU or in pinned memory. At least one of the two is on the GPU.

    Raises:
        ConfigError: a tensor is of another kind, or the two are on two GPUs.

    Example:
        ```python
        flag = torch.zeros(1, dtype=torch.int64).pin_memory()
        seq = torch.ones(1, dtype=torch.int64, device="cuda")
        f.write_flag(flag, seq)  # when the stream comes to it, flag is 1
        f.seq_add_one(seq)  # the next time 2
        ```
    """
    _loader.load().write_flag(flag, seq)


def wait_flag(flag: Tensor, seq: Tensor, timeout_ms: float | None = None) -> None:
    """Makes the current CUDA stream wait until ``flag >= seq``.

    The call can be captured into a CUDA graph. Memory is kept as by ``write_flag``.

    The wait also ends, and the stream goes on without the flag, when the last node of this process
    is stopped or closed, and when the interpreter ends. That holds for waits that are enqueued
    already, and for those of graphs until a node is opened or this function is called again. The
    engine does not know who writes the flag, so the loss of a peer ends no wait.

    Args:
        flag: one int64, on the GPU or in pinned memory.
        seq: one int64, on the GPU or in pinned memory. At least one of the two is on the GPU.
        timeout_ms: ends the wait so many milliseconds after it has begun; None: no limit. In a
            graph it stays as it was captured.

    Raises:
        ConfigError: a tensor is of another kind, or the two are on two GPUs.
        TimeoutError: an earlier wait, of any stream, has lasted for its ``timeout_ms``. This call
            has enqueued nothing; the next call works.

    Example:
        ```python
        f.wait_flag(flag, seq, timeout_ms=1000)
        y = x + 1  # runs when flag has reached seq
        ```
    """
    _loader.load().wait_flag(flag, seq, timeout_ms)


def seq_add_one(seq: Tensor) -> None:
    """Adds one to ``seq`` on the current CUDA stream, after what is queued there.

    The call can be captured into a CUDA graph, so that each replay counts on.

    Args:
        seq: one int64 on the GPU.

    Raises:
        ConfigError: the tensor is of another kind.

    Example:
        ```python
        f.seq_add_one(seq)
        f.write_flag(flag, seq)
        ```
    """
    _loader.load().seq_add_one(seq)
