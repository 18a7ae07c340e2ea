"""A small Llama of transformers, its tokens split over ranks, against itself unsplit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import Rank, World

from fserver.errors import ConfigError
from fserver.ringx import integration, positions, register_attention, shard, unshard

pytest.importorskip("transformers", reason="needs transformers (make setup)")

TOKENS, VOCABULARY = 24, 32


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def llama(attention: str, window: int | None = None) -> Any:
    """With a window, a Mistral."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    kinds: Any = (MistralConfig, MistralForCausalLM) if window else (LlamaConfig, LlamaForCausalLM)
    config = kinds[0](
        **({"sliding_window": window} if window else {}), **SIZES, attn_implementation=attention
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
    register_attention(group=me.group, agreed=False)
    model = llama("ringx")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    hides = torch.ones(1, 8, dtype=torch.int64)
    hides[0, 0] = 0
    model(ids, attention_mask=torch.ones_like(hides), use_cache=False)
    said = []
    model(ids, num_items_in_batch=torch.tensor(8), use_cache=False)
    ends = {"cu_seq_lens_q": torch.tensor([0, 16]), "cu_seq_lens_k": torch.tensor([0, 8, 16])}
    one = {"attention_mask": hides if me.rank else None}
    extra = {"indices": hides}, {"of_a_new_model": hides}
    for given in ({"attention_mask": hides}, {"sliding_window": 4}, ends, one, *extra, {}):
        if not given:
            model.train()
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.5
        said.append(refusal(model, ids, **given))
    return said


def refusal(model: Any, ids: torch.Tensor, **given: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        model(ids, use_cache=False, **given)
    return str(raised.value)


def test_what_it_refuses(world: World):
    for rank, answers in enumerate(world.run((2, 3), refused)):
        mask, window, ends, one, indices, new, dropout = answers
        assert "attention_mask hides tokens" in mask
        assert "layout zigzag with algorithm auto, window=4, which needs contiguous" in window
        assert "cu_seq_lens_k differs from cu_seq_lens_q: not supported" in ends
        where = "" if rank else "rank 1 of the group has refused its own arguments: "
        assert f"ringx: {where}attention_mask hides tokens" in one
        for name, text in (("indices", indices), ("of_a_new_model", new)):
            assert text.startswith(f"ringx: {name} tensor(") and "want none (not supported" in text
        assert (
            "dropout 0.5 of type float: want none (not supported: use another attn_impl" in dropout
        )


def masked(me: Rank) -> list[str]:
    """What models say whose mask ringx does not compute, and documents without their lengths: on
    both ranks, or on one alone."""
    from transformers import (
        Llama4ForCausalLM,
        Llama4TextConfig,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )

    register_attention(group=me.group, agreed=False)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    small = {**SIZES, "attn_implementation": "ringx"}
    experts = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    chunked = Llama4TextConfig(
        **small, attention_chunk_size=4, head_dim=8, intermediate_size_mlp=64, num_local_experts=2
    )
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    sliding = Qwen2MoeConfig(**small, **experts, **window)
    said = [refusal(Llama4ForCausalLM(chunked), ids), refusal(Qwen2MoeForCausalLM(sliding), ids)]
    model, packed = llama("ringx"), torch.arange(8)[None] % 4
    model(ids, position_ids=positions(16, "zigzag", group=me.group)[None], use_cache=False)
    for where in (packed, packed if me.rank else torch.arange(8)[None]):
        said.append(refusal(model, ids, position_ids=where))
    return said


def test_masks_that_ringx_does_not_compute(world: World):
    for rank, (chunked, sliding, packed, one) in enumerate(world.run((2, 3), masked)):
        assert "mask_function is made of and_masks, causal_mask_function, chunked_over" in chunked
        assert "sliding_window None of type NoneType: want 4, as the mask of the layer" in sliding
        assert packed.startswith("ringx: position_ids start again, as those of packed documents")
        where = "" if rank else "rank 1 of the group has refused its own arguments: "
        assert one.startswith(f"ringx: {where}position_ids start again"), one


def mask_of(create: Any, config: Any, **given: Any) -> Any:
    x, where = torch.zeros(1, 8, 32), torch.arange(8)[None] % 5
    more = {"attention_mask": None, "past_key_values": None, "position_ids": where}
    return create(config=config, inputs_embeds=x, **more, **given)


def test_which_masks_are_refused():
    """Blocks that see each other, and functions of the model's own. None where only the positions
    restart: attention says what is wrong with that."""
    from transformers import LlamaConfig, masking_utils

    register_attention()
    config = LlamaConfig(**SIZES, sliding_window=3, attn_implementation="ringx")
    causal, sliding = (
        masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
    )  # fmt: skip
    assert mask_of(causal, config) is None
    assert mask_of(sliding, config) == integration.Mask("", 3, True)
    full = masking_utils.create_bidirectional_mask
    assert mask_of(full, config) == integration.Mask("", None, False)
    blocks = torch.zeros(1, 8, dtype=torch.int64)
    assert "blockwise_overlay" in mask_of(causal, config, block_sequence_ids=blocks).problem
    for name in ("or_mask_function", "and_mask_function"):
        own = {name: masking_utils.causal_mask_function}
        assert "use_vmap is True" in mask_of(causal, config, **own).problem

    class Own:
        def __call__(self, *where: int) -> bool:
            return True

    for function in (Own(), partial(Own()), masking_utils.and_masks(Own())):
        assert "mask_function is made of" in integration._mask(mask_function=function).problem


def test_positions_that_start_again():
    """The answer is kept for a tensor, until the tensor changes."""
    seen, where = integration.Positions(), torch.arange(8)[None]
    assert not seen.restart(where) and not seen.restart(None)
    where[0, 4] = 0
    assert seen.restart(where) and not seen.restart(torch.arange(8)[None])
    assert not seen.restart(where.expand(3, 1, 8)), "of pictures"
    assert seen.restart(torch.zeros_like(where)), "documents of one token"
    assert not seen.restart(torch.tensor([[0, 1, 2, 2]])), "padding behind the tokens"


def whole_mask(me: Rank) -> tuple[float, str]:
    """Of a model whose mask hides nothing, and whose modules do not say so: the relative error of
    what it computes, and what it says to a layout for causal masks."""
    from transformers import SplinterConfig, SplinterModel

    config = {**SIZES, "max_position_embeddings": TOKENS, "question_token_id": 1}
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.manual_seed(5))

    def states(attention: str, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        model = SplinterModel(SplinterConfig(**config, attn_implementation=attention)).double()
        return model.eval()(ids, position_ids=where).last_hidden_state.detach()

    want = states("eager", ids, torch.arange(TOKENS)[None])
    found = []
    for layout in "contiguous", "zigzag":
        register_attention(group=me.group, layout=layout)
        mine = shard(ids, layout, group=me.group)
        where = positions(TOKENS, layout, group=me.group)[None]
        try:
            got = unshard(states("ringx", mine, where), layout, group=me.group)
            found.append(float((got - want).norm() / want.norm()))
        except ConfigError as error:
            found.append(str(error))
    return tuple(found)


def test_a_mask_that_hides_nothing(world: World):
    for error, refusal in world.run((2, 3), whole_mask):
        assert error < 1e-6, error
        assert "layout zigzag" in refusal and "contiguous" in refusal


def mixed(me: Rank) -> float:
    """The relative error of the logits under autocast, with weights in float32."""
    register_attention(group=me.group)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.manual_seed(5))
    want = llama("eager").float()(ids, use_cache=False).logits
    how: dict[str, Any] = {"group": me.group}
    where = positions(TOKENS, "zigzag", **how)[None]
    with torch.autocast("cpu", torch.bfloat16):
        part = llama("ringx").float()(
            shard(ids, "zigzag", **how), position_ids=where, use_cache=False
        )
    got = unshard(part.logits.detach(), "zigzag", **how).float()
    return float((got - want).norm() / want.norm())


def test_autocast(world: World):
    for error in world.run((2, 3), mixed):
        assert error < 0.05, error
