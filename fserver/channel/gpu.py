"""The side of a stream channel whose tensors are on a GPU that its peers' GPUs can reach."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fserver import _loader
from fserver.channel import nvrtc
from fserver.channel.plan import MOST_ROWS, TABLE, Piece, Plan, Table
from fserver.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from fserver import _C


def piece(tensor: Tensor) -> Piece:
    """Returns the memory of a contiguous tensor. A tensor without dimensions is one row.

    Raises:
        ShapeError: it has more rows than the kernels count.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if rows > MOST_ROWS:
        raise ShapeError(
            f"channel: a tensor of shape {list(tensor.shape)} has {rows} rows, and a channel "
            f"between GPUs takes at most {MOST_ROWS} (pass a view of fewer, longer rows)"
        )
    row = math.prod(tensor.shape[1:]) * tensor.element_size()
    return Piece(tensor.data_ptr(), rows, row)


class _Words:
    """int64 memory of a lane, for torch.as_tensor, whose tensors keep this."""

    def __init__(self, lane: Any, address: int, n: int) -> None:
        self._lane = lane
        self.__cuda_array_interface__ = {
            "shape": (n,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class GpuSide:
    """One side, without the way in which it learns of the other.

    Args:
        device: ordinal of the GPU.
        mode: ``"kernel"`` or ``"copy"``.
        outgoing, incoming: for each peer, the tensors that go to it and come from it.
        send_first: this side speaks first.
        timeout_ms: how long a kernel waits for a peer.
        table: how what is incoming comes.
    """

    def __init__(
        self,
        device: int,
        mode: str,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[Sequence[Tensor]],
        send_first: bool,
        timeout_ms: float,
        table: Table = TABLE,
    ) -> None:

        extension = _loader.load()
        arch = extension.lane_arch(device)
        image = nvrtc.image(extension.lane_source(), arch) if mode == "kernel" else b""
        self.lane: _C.Lane = extension.Lane(device, image, timeout_ms, arch >= 90)
        try:
            self.plan = Plan(
                self.lane,
                device,
                mode,
                [[piece(t) for t in row] for row in outgoing],
                [[piece(t) for t in row] for row in incoming],
                send_first,
                table,
            )
        except BaseException:
            self.lane.close()
            raise
        self._words: weakref.WeakSet[_Words] = weakref.WeakSet()  # that tensors use
        self.lane.hold([t for row in (*outgoing, *incoming) for t in row])
        self._device = device
        # A peer may write to these tensors from now on, and what filled them comes first.
        extension.settle(device)
        if mode == "copy":  # which tells the rows only when there are fewer than all
            self._fill_rows(incoming)
        self.send, self.recv = self.lane.send, self.lane.recv

    def _fill_rows(self, incoming: Sequence[Sequence[Tensor]]) -> None:
        import torch

        for words, row in zip(self.rows(), incoming, strict=True):
            words.copy_(torch.tensor([piece(t).rows for t in row], dtype=torch.int64))
        _loader.load().settle(self._device)

    def describe(self, peer: int) -> dict[str, Any]:
        return self.plan.describe(peer)

    def attach(self, descriptions: Sequence[Any]) -> None:
        """Takes the descriptions of all peers; send and recv may be called from now on."""
        for peer, theirs in enumerate(descriptions):
            self.plan.attach(peer, theirs)
        self.plan.install()

    def rows(self) -> list[Tensor]:
        """For each peer, the rows of each tensor in its last message: int64 on the GPU."""
        import torch

        address, counts = self.plan.rows
        if not sum(counts):
            return [
                torch.empty(0, dtype=torch.int64, device=f"cuda:{self._device}") for _ in counts
            ]
        memory = _Words(self.lane, address, sum(counts))
        self._words.add(memory)
        return list(torch.as_tensor(memory, device=f"cuda:{self._device}").split(counts))

    def status(self) -> tuple[int, int]:
        return self.lane.status()

    def explain(self, why: Callable[..., None]) -> None:
        """Sets the function that raises the cause when a call finds the channel ended. When a
        call fails half-way, the function gets that error as its argument."""
        self.lane.explain(why)

    @property
    def abort_word(self) -> int:
        """The address at which the engine marks the channel as ended."""
        return self.lane.abort_word

    def abort(self) -> None:
        self.lane.abort()

    def finish(self) -> None:
        """Waits for the queued work. Each wait in it has a time limit."""
        self.lane.finish()

    def end(self) -> None:
        """Ends the side, and waits for the queued work."""
        self.lane.end()

    def close(self) -> bool:
        """Ends the side and gives back its memory. False: not yet. A graph or a tensor of rows()
        uses it, or a capture forbids to wait for the queued work."""
        self.lane.end()
        return not self._words and self.lane.close()
