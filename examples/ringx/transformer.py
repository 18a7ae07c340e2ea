"""The model that both examples share, and what an example is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel import Sections, copied, joined, part_of, summed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # input and target, [B, S, ...]


@dataclass(frozen=True)
class Config:
    """A model and its training. ``tokens`` is the length of the whole sequence."""

    tokens: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int  # width of the feed-forward part
    batch: int = 1
    steps: int = 1
    rate: float = 3e-4
    large: bool = False  # needs GPUs: weights are sharded, and blocks are recomputed in backward

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rotate(x: Tensor, where: Tensor, base: float = 500000.0) -> Tensor:
    """Applies the rotary embedding to [B, S, H, D], whose rows have the positions `where`, [S]."""
    half = x.shape[-1] // 2
    speed = base ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (where[:, None] * speed)[:, None]  # [S, 1, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Block(nn.Module):
    """A block of Llama: attention and a gated feed-forward part."""

    def __init__(self, config: Config, rotary: bool):
        super().__init__()
        self.config, self.rotary = config, rotary
        self.heads, self.kv_heads = config.heads, config.kv_heads  # those of this rank
        self.tp: dist.ProcessGroup | None = None
        wide = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, wide, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def sections(self) -> dict[str, Sections]:
        """Returns how tensor ranks divide the weights: by heads, and by the hidden width."""
        config = self.config
        q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
        up = config.hidden, config.hidden
        return {"qkv": (0, (q, k, k)), "out": (1, (q,)), "up": (0, up), "down": (1, up[:1])}

    def divide(self, tp: DeviceMesh) -> None:
        """Keeps this tensor rank's part of the weights."""
        for name, sections in self.sections().items():
            layer = getattr(self, name)
            layer.weight = nn.Parameter(part_of(layer.weight.detach(), sections, tp))
        self.heads, self.kv_heads = self.heads // tp.size(), self.kv_heads // tp.size()
        self.tp = tp.get_group()

    def forward(self, x: Tensor, where: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv(copied(self.norm1(x), self.tp)).unflatten(-1, (-1, self.config.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 2)
        if self.rotary:
            q, k = rotate(q, where), rotate(k, where)
        x = x + summed(self.out(attend(q, k, v).flatten(2)), self.tp)
        gate, up = self.up(copied(self.norm2(x), self.tp)).chunk(2, -1)
        return x + summed(self.down(F.silu(gate) * up), self.tp)


class Transformer(nn.Module):
    """Blocks between an embedding and a head. Everything except attention works row by row."""

    def __init__(self, config: Config, embed: nn.Module, head: nn.Module, rotary: bool):
        super().__init__()
        self.config, self.embed, self.head = config, embed, head
        self.place = None if rotary else nn.Embedding(config.tokens, config.dim)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)

    def forward(
        self, x: Tensor, target: Tensor, where: Tensor, attend: Attend, loss: Callable[..., Tensor]
    ) -> Tensor:
        """Returns the sum of the loss over these rows, which have the positions `where`."""
        x = self._last(x, where, attend)
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        for rows, wanted in zip(x.split(8192, 1), target.split(8192, 1), strict=True):
            if self.config.large:  # the outputs of a million rows do not fit into memory
                total = total + checkpoint(self._loss, rows, wanted, loss, use_reentrant=False)
            else:
                total = total + self._loss(rows, wanted, loss)
        return total

    def outputs(self, x: Tensor, where: Tensor, attend: Attend) -> Tensor:
        """Returns the output for each of these rows."""
        return self.head(self._last(x, where, attend))

    def _last(self, x: Tensor, where: Tensor, attend: Attend) -> Tensor:
        x = self.embed(x)
        if self.place is not None:
            x = x + self.place(where)
        for block in self.blocks:
            if self.config.large:
                x = checkpoint(block, x, where, attend, use_reentrant=False)
            else:
                x = block(x, where, attend)
        return self.norm(x)

    def _loss(self, rows: Tensor, wanted: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        return loss(self.head(rows), wanted)

    def divide(self, tp: DeviceMesh) -> None:
        """Keeps this tensor rank's part of each block."""
        for block in self.blocks if tp.size() > 1 else ():
            block.divide(tp)

    def whole_weights(self, tp: DeviceMesh) -> dict[str, Tensor]:
        """Returns the weights as one process has them, on the CPU. All ranks make the call; rank 0
        alone gets them."""
        sections = {
            f"blocks.{index}.{name}.weight": how
            for index, block in enumerate(self.blocks)
            for name, how in block.sections().items()
        }
        found = {}
        for name, weight in self.state_dict().items():
            if isinstance(weight, DTensor):  # FSDP's
                weight = weight.full_tensor()
            if tp.size() > 1 and name in sections:
                weight = joined(weight, sections[name], tp)
            if dist.get_rank() == 0:
                found[name] = weight.cpu()
        return found


@dataclass
class Example:
    """One of the two examples: its model, data and mask."""

    name: str
    configs: dict[str, Config]  # the first is the default
    model: Callable[[Config], Transformer]
    batches: Callable[[Config], Iterator[Batch]]  # whole ones, the same on all ranks
    loss: Callable[[Tensor, Tensor], Tensor]  # summed over rows
    causal: bool
