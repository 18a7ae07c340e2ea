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


def llama(attention: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).double()


def loss_of(model: Any, ids: torch.Tensor, target: torch.Tensor, where: torch.Tensor) -> Any:
    """The sum over tokens, and the logits."""
    logits = model(ids, position_ids=where, use_cache=False).logits
    found = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="sum"
    )
    return found, logits


def split(me: Rank) -> tuple[float, float, float]:
    """Relative errors of loss, logits and gradients, split against whole."""
    register_attention(group=me.group)
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    ids, target = ids[:, :-1], ids[:, 1:]
    whole, part = llama("eager"), llama("ringx")
    want, logits = loss_of(whole, ids, target, torch.arange(TOKENS)[None])
    want.backward()
    mine = [shard(t, "zigzag", group=me.group) for t in (ids, target)]
    got, some = loss_of(part, *mine, positions(TOKENS, "zigzag", group=me.group)[None])
    got.backward()
    total = got.detach().clone()
    dist.all_reduce(total, group=me.group)
    worst = 0.0
    for a, b in zip(part.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(a.grad, group=me.group)
        worst = max(worst, float((a.grad - b.grad).norm() / b.grad.norm()))
    joined = unshard(some.detach(), "zigzag", group=me.group)
    return (
        abs(float(total / want) - 1),
        float((joined - logits).norm() / logits.norm()),
        worst,
    )


@pytest.mark.parametrize("members", [(2, 3), (1, 2, 3)], ids=str)
def test_a_split_llama_is_itself(world: World, members: tuple[int, ...]):
    for errors in world.run(members, split):
        assert max(errors) < 1e-6, errors  # its norms are in float32


def refused(me: Rank) -> list[str]:
    """What the model says to masks, dropout and a cache of other lengths."""
    register_attention(group=me.group)
    model = llama("ringx")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    hides = torch.ones(1, 8, dtype=torch.int64)
    hides[0, 0] = 0
    model(ids, attention_mask=torch.ones_like(hides), use_cache=False)
    said = []
    for given in ({"attention_mask": hides}, {"sliding_window": 4}, {}):
        if not given:
            model.train()
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.5
        with pytest.raises(ConfigError) as raised:
            model(ids, use_cache=False, **given)
        said.append(str(raised.value))
    return said


def test_what_it_refuses(world: World):
    for mask, window, dropout in world.run((2, 3), refused):
        assert "attention_mask hides tokens" in mask
        assert "sliding_window 4: not supported" in window
        assert "dropout 0.5: not supported" in dropout
