"""A small Llama of transformers, its tokens split over ranks, against itself unsplit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import Rank, World

from fserver.errors import ConfigError
from fserver.ringx import positions, register_attention, shard, unshard

pytest.importorskip("transformers", reason="needs transformers (make setup)")

TOKENS, VOCABULARY = 24, 32


def llama(attention: str, window: int | None = None) -> Any:
    """With a window, a Mistral."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    kinds: Any = (MistralConfig, MistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
        **({"sliding_window": window} if window else {}),
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return kinds[1](config).double()


def loss_of(
    model: Any, ids: torch.Tensor, target: torch.Tensor, where: torch.Tensor, **more: Any
) -> Any:
    """The sum over tokens, and the logits."""
    logits = model(ids, position_ids=where, use_cache=False, **more).logits
    found = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="sum"
    )
    return found, logits


def split(
    me: Rank, window: int | None = None, ends: list[int] | None = None
) -> tuple[float, float, float]:
    """Relative errors of loss, logits and gradients, split against whole."""
    layout, batch = "contiguous" if window else "zigzag", 1 if ends else 2
    register_attention(group=me.group, layout=layout)
    ids = torch.randint(VOCABULARY, (batch, TOKENS + 1), generator=torch.manual_seed(5))
    ids, target = ids[:, :-1], ids[:, 1:]
    whole, part = llama("eager", window), llama("ringx", window)
    how: dict[str, Any] = {"group": me.group, "cu_seqlens": ends}
    if ends:  # transformers sees documents by their positions
        where = positions(TOKENS, "contiguous", 0, 1, cu_seqlens=ends)[None]
        lengths = torch.tensor(ends, dtype=torch.int32)
        more = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    else:
        where, more = torch.arange(TOKENS)[None], {}
    want, logits = loss_of(whole, ids, target, where)
    want.backward()
    mine = [shard(t, layout, **how) for t in (ids, target)]
    got, some = loss_of(part, *mine, positions(TOKENS, layout, **how)[None], **more)
    got.backward()
    total = got.detach().clone()
    dist.all_reduce(total, group=me.group)
    worst = 0.0
    for a, b in zip(part.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(a.grad, group=me.group)
        worst = max(worst, float((a.grad - b.grad).norm() / b.grad.norm()))
    joined = unshard(some.detach(), layout, **how)
    return (
        abs(float(total / want) - 1),
        float((joined - logits).norm() / logits.norm()),
        worst,
    )


@pytest.mark.parametrize("members", [(2, 3), (1, 2, 3)], ids=str)
def test_a_split_llama_is_itself(world: World, members: tuple[int, ...]):
    for errors in world.run(members, split):
        assert max(errors) < 1e-6, errors  # its norms are in float32


@pytest.mark.parametrize("window", [None, 5])
def test_packed_documents_and_a_sliding_window(world: World, window: int | None):
    for errors in world.run((1, 2, 3), split, window, [0, 6, 18, 24]):
        assert max(errors) < 1e-6, errors


def test_a_sliding_window(world: World):
    for errors in world.run((2, 3), split, 5):
        assert max(errors) < 1e-6, errors


def refused(me: Rank) -> list[str]:
    """What the model says to masks, dropout and a cache of other lengths."""
    register_attention(group=me.group)
    model = llama("ringx")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    hides = torch.ones(1, 8, dtype=torch.int64)
    hides[0, 0] = 0
    model(ids, attention_mask=torch.ones_like(hides), use_cache=False)
    said = []
    ends = {"cu_seq_lens_q": torch.tensor([0, 16]), "cu_seq_lens_k": torch.tensor([0, 8, 16])}
    for given in ({"attention_mask": hides}, {"sliding_window": 4}, ends, {}):
        if not given:
            model.train()
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.5
        with pytest.raises(ConfigError) as raised:
            model(ids, use_cache=False, **given)
        said.append(str(raised.value))
    return said


def test_what_it_refuses(world: World):
    for mask, window, ends, dropout in world.run((2, 3), refused):
        assert "attention_mask hides tokens" in mask
        assert "layout zigzag with algorithm auto, window=4, which needs contiguous" in window
        assert "cu_seq_lens_k differs from cu_seq_lens_q: not supported" in ends
        assert (
            "dropout 0.5 of type float: want none (not supported: use another attn_impl" in dropout
        )
