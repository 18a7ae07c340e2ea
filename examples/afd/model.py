"""A Llama-like model, cut in two.

Each layer of such a model is

    hidden = hidden + attention(norm(hidden))      looks back at earlier tokens: has a KV cache
    hidden = hidden + mlp(norm(hidden))            looks at each token alone: remembers nothing

Attention runs on the worker that owns the text. An MLP needs only rows of hidden
states and no text, so one server computes the MLPs of all workers at once. The two
classes below are the two halves. Each is built from the whole model and deletes the
weights of the other half.
"""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is given as a path; nothing is downloaded

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def load(path: str | Path):
    """Returns the tokenizer and the whole model in float32, from a Hugging Face folder or a GGUF
    file."""
    path = Path(path)
    file = {}
    if path.suffix == ".gguf":
        path, file = path.parent, {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path, **file)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", **file
    )
    check(model)
    return tokenizer, model.eval()


def check(model: nn.Module) -> None:
    """Raises ValueError unless the layers have the form above."""
    parts = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    for layer in getattr(getattr(model, "model", None), "layers", [nn.Module()]):
        found = {name for name, _ in layer.named_children()}
        mlp = {name for name, _ in layer.mlp.named_children()} if found == parts else set()
        if not {"gate_proj", "up_proj", "down_proj"} <= mlp:
            raise ValueError(
                f"{type(model).__name__} is not like Llama: a layer has {sorted(found)}, want "
                f"{sorted(parts)}, and gate_proj, up_proj and down_proj in mlp"
            )


def encode(tokenizer, prompt: str) -> list[int]:
    """Returns the token ids of a prompt, inside the chat template of the model if it has one."""
    if not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def weight_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


class Text:
    """A text that the model is writing: its token ids and the state of the model."""

    def __init__(self, number: int, prompt: list[int], config):
        self.number = number  # index of the prompt
        self.pending = prompt  # ids that the model has not processed yet
        self.written: list[int] = []
        self.logits: list[float] = []  # one for each written token
        self.done = False
        self.cache = DynamicCache(config=config)
        self.hidden: Tensor  # [1, pending, hidden size]
        self.rotary: tuple[Tensor, Tensor]


class Attention(nn.Module):
    """The worker's half: embeddings, attention, norms and head. No MLPs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        for layer in model.model.layers:
            del layer.mlp
        self.model = model
        self.config = model.config
        self.layers = len(model.model.layers)
        end = model.generation_config.eos_token_id
        self.ends = set(end) if isinstance(end, list) else {end}

    def begin(self, text: Text) -> None:
        """Embeds the pending ids before the first layer: the whole prompt, or the last token."""
        seen = text.cache.get_seq_length()
        positions = torch.arange(seen, seen + len(text.pending)).unsqueeze(0)
        text.hidden = self.model.model.embed_tokens(torch.tensor([text.pending]))
        text.rotary = self.model.model.rotary_emb(text.hidden, positions)

    def attend(self, number: int, text: Text) -> Tensor:
        """Computes the attention of a layer. Returns the MLP's input, [pending, hidden size]."""
        layer = self.model.model.layers[number]
        out, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(text.hidden),
            position_embeddings=text.rotary,
            attention_mask=None,  # a single text: causal, without padding
            past_key_values=text.cache,
        )
        text.hidden = text.hidden + out
        return layer.post_attention_layernorm(text.hidden)[0]

    def end(self, text: Text, limit: int) -> None:
        """Appends the most likely token, after the last layer."""
        last = self.model.model.norm(text.hidden[:, -1])
        logit, token = self.model.lm_head(last).max(-1)
        text.pending = [int(token)]
        text.written.append(int(token))
        text.logits.append(float(logit))
        text.done = int(token) in self.ends or len(text.written) == limit


class FFN(nn.Module):
    """The server's half: the MLPs. With several servers, each has a part of the columns.

    down(act(gate(x)) * up(x)) is a sum over the columns in the middle. Each server
    computes a range of columns, so the sum of all answers is the whole result.
    """

    def __init__(self, model: nn.Module, server: int, servers: int):
        super().__init__()
        self.mlps = nn.ModuleList(layer.mlp for layer in model.model.layers)
        if servers > 1:
            for mlp in self.mlps:
                columns = torch.arange(mlp.gate_proj.out_features).tensor_split(servers)[server]
                for proj in (mlp.gate_proj, mlp.up_proj):
                    keep(proj, "weight", columns)
                    keep(proj, "bias", columns)
                mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, columns])
                if server > 0:  # only server 0 adds the bias
                    mlp.down_proj.bias = None

    def forward(self, layer: int, rows: Tensor) -> Tensor:
        return self.mlps[layer](rows)


def keep(linear: nn.Linear, name: str, rows: Tensor) -> None:
    """Keeps only the given rows of a weight or bias."""
    if (whole := getattr(linear, name)) is not None:
        setattr(linear, name, nn.Parameter(whole[rows]))
