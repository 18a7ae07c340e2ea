"""The tensors of ringx_bench.py, what is right in float64, and how far off an answer is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ringx_ways import Way
from torch import Tensor

from fserver.ringx import kernels, positions
from fserver.ringx.kernels import Given


def tensors(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """q, k, v and the gradient of out, of the whole sequence, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(tokens)
    return [
        torch.randn(1, tokens, n, dim, device=device, dtype=torch.float32, generator=generator).to(
            dtype
        )
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def exact(whole: list[Tensor], causal: bool, rows: Tensor) -> dict[str, Tensor]:
    """out and dq of some rows in float64, from all keys. [1, rows, H, D]"""
    q, k, v, dout = whole
    group = q.shape[2] // k.shape[2]
    found: dict[str, list[Tensor]] = {"out": [], "dq": []}
    for head in range(q.shape[2]):
        some, grad = q[0, rows, head].double(), dout[0, rows, head].double()
        keys, values = (t[0, :, head // group].double() for t in (k, v))
        scores = some @ keys.T * q.shape[-1] ** -0.5
        if causal:
            unseen = torch.arange(keys.shape[0], device=q.device)[None] > rows[:, None]
            scores = scores.masked_fill_(unseen, -torch.inf)
        p = scores.softmax(-1)
        out = p @ values
        found["out"].append(out)
        ds = p * (grad @ values.T - (grad * out).sum(-1, keepdim=True))
        found["dq"].append(ds @ keys * q.shape[-1] ** -0.5)
    return {name: torch.stack(parts, 1)[None] for name, parts in found.items()}


def exact_all(whole: list[Tensor], causal: bool) -> dict[str, Tensor]:
    """out and all gradients in float64, a head at a time."""
    q, k, v, dout = (t.double() for t in whole)
    out, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    for head in range(q.shape[2]):
        near = head // group
        one = [t[:, :, n].unsqueeze(1) for t, n in ((q, head), (k, near), (v, near))]
        result, lse = kernels.REFERENCE.forward(*one, causal, scale)
        given = Given(dout[:, :, head].unsqueeze(1), *one, result, lse)
        grads = kernels.REFERENCE.backward(given, causal, scale)
        out[:, :, head], dq[:, :, head] = result[:, 0], grads[0][:, 0]
        dk[:, :, near] += grads[1][:, 0]
        dv[:, :, near] += grads[2][:, 0]
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def off(found: Tensor, want: Tensor) -> Tensor:
    """Squared error and squared size, to be added up over ranks."""
    return torch.stack(((found.detach().double() - want).square().sum(), want.square().sum()))


def relative(sums: Tensor) -> float:
    """Root mean square error over root mean square."""
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def local(whole: list[Tensor], way: Way) -> tuple[list[Tensor], Tensor]:
    """This rank's part of all, and where it is."""
    rank, size = (0, 1) if way.whole else (dist.get_rank(), dist.get_world_size())
    where = positions(whole[0].shape[1], way.layout, rank, size, whole[0].device)
    parts = whole if way.whole else [t[:, where] for t in whole]
    return [t.detach().requires_grad_() for t in parts[:3]] + [parts[3]], where
