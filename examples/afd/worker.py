"""The attention worker. It owns texts and sends rows of hidden states to the FFN servers.

The texts are divided into micro-batches. While the servers compute the MLP of one
micro-batch, the worker computes the attention of the next:

    worker    a0 b0 a1 b1 a2 b2
    server       a0 b0 a1 b1 a2 b2
"""

import json
import time

import torch
from model import Attention, Text, encode, load, weight_bytes
from protocol import VOTE, key_of, options
from torch import Tensor
from tqdm import tqdm

import fserver


class MicroBatch:
    """Texts of a worker that go through the layers together."""

    def __init__(self, number: int, texts: list[Text]):
        self.number = number
        self.texts = texts
        self.going: list[Text] = []  # the texts that are not done
        self.asked: tuple[int, list[Tensor]] | None = None  # handle and answers that are open


class Writer:
    """Writes the texts of one worker."""

    def __init__(self, worker: fserver.Worker, model: Attention, texts: list[Text], batches: int):
        self.worker = worker
        self.model = model
        self.batches = [MicroBatch(m, texts[m::batches]) for m in range(batches)]
        self.bytes = 0  # bytes sent; as many are received
        self.traces: list[list[int]] = []  # fetch_trace of each push_pull after the first step

    def step(self, limit: int) -> bool:
        """Writes one token for each text that is not done. Reports whether any worker goes on.

        A worker without texts still pushes zero rows, because a server's batch contains one
        request of each worker.
        """
        for batch in self.batches:
            batch.going = [text for text in batch.texts if not text.done]
            for text in batch.going:
                self.model.begin(text)
        for layer in range(self.model.layers):
            for batch in self.batches:
                self.receive(batch)  # the MLP of the previous layer
                rows = [self.model.attend(layer, text) for text in batch.going]
                rows = torch.cat([torch.empty(0, self.model.config.hidden_size), *rows])
                batch.asked = self.ask(rows, key_of(layer, batch.number, self.model.layers))
        for batch in self.batches:
            self.receive(batch)
            for text in batch.going:
                self.model.end(text, limit)
        return self.vote()

    def ask(self, rows: Tensor, key: int) -> tuple[int, list[Tensor]]:
        """Pushes rows to every server. Each server answers with as many rows."""
        answers = [torch.empty_like(rows) for _ in range(self.worker.servers)]
        self.bytes += rows.nbytes * len(answers)
        return self.worker.push_pull([rows], [key], answers, [key]), answers

    def receive(self, batch: MicroBatch) -> None:
        if batch.asked is None:
            return
        handle, answers = batch.asked
        batch.asked = None
        self.worker.wait(handle, timeout_ms=60_000)
        rows = sum(answers[1:], answers[0])  # each server has computed a part of the columns
        parts = rows.split([len(text.pending) for text in batch.going])
        for text, part in zip(batch.going, parts, strict=True):
            text.hidden = text.hidden + part
        if batch.going and batch.going[0].written:
            self.traces.append(self.worker.fetch_trace(handle))

    def vote(self) -> bool:
        """Reports whether any worker has a text that is not done."""
        mine = sum(not text.done for batch in self.batches for text in batch.texts)
        handle, totals = self.ask(torch.tensor([mine]), VOTE)
        self.worker.wait(handle, timeout_ms=60_000)
        return bool(totals[0] > 0)


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    tokenizer, whole = load(args.model)
    model = Attention(whole)
    with fserver.Worker(backend="CPU") as worker, torch.inference_mode():
        numbers = range(len(args.prompt))[worker.rank :: worker.workers]
        texts = [Text(i, encode(tokenizer, args.prompt[i]), model.config) for i in numbers]
        writer = Writer(worker, model, texts, args.micro_batches)
        begin = time.monotonic()
        with tqdm(total=len(texts) * args.max_new_tokens, desc="generating", unit="tok") as bar:
            going = True
            while going:
                going = writer.step(args.max_new_tokens)
                bar.update(sum(len(text.written) for text in texts) - bar.n)
        seconds = time.monotonic() - begin

    if args.out:
        result = {
            "weights": weight_bytes(model),
            "seconds": seconds,
            "bytes": writer.bytes,
            "traces": writer.traces,
            "texts": [
                {"prompt": text.number, "ids": text.written, "logits": text.logits}
                for text in texts
            ],
        }
        (args.out / f"worker-{worker.rank}.json").write_text(json.dumps(result))
    else:
        for text in texts:
            print(f"{args.prompt[text.number]}\n{tokenizer.decode(text.written)}\n")


if __name__ == "__main__":
    main()
