"""The keys and the command-line options that worker and server share."""

import argparse
from pathlib import Path

VOTE = 1 << 32  # key of the vote at the end of a step: how many texts are not done?


def key_of(layer: int, micro_batch: int, layers: int) -> int:
    """Returns the key of a layer of a micro-batch. Each key has receive buffers of its own."""
    return micro_batch * layers + layer


def layer_of(key: int, layers: int) -> int:
    return key % layers


def count(text: str) -> int:
    """The type of an option that is a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: want a whole number, 1 or more")
    return int(text)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder or GGUF file")
    add("--prompt", action="append", default=[], help="a prompt for one worker; may be repeated")
    add("--micro-batches", type=count, default=1, help="micro-batches of each worker (default 1)")
    add("--max-new-tokens", type=count, default=64, help="limit for each prompt (default 64)")
    add("--threads", type=count, default=1, help="threads of torch in each process (default 1)")
    add("--out", type=Path, help="folder for the results, one JSON file of each process")
    return parser.parse_args()
