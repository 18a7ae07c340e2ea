"""Random requests and answers: drawn from a seed, so that both sides know what is right."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from fserver.bench.actors import POISON, TIMEOUT_MS, Actor, first_difference
from fserver.bench.errors import WrongDataError

MAX_DIMS = 10
KEYS = 12  # few, so that each comes again with another shape and type


def usable_dtypes() -> list[torch.dtype]:
    """Those that can be made from bytes; quantized ones (torch.qint8, ...) cannot."""
    found = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    found = {dtype for dtype in found if not str(dtype).startswith("torch.q")}
    usable = []
    for dtype in sorted(found, key=str):
        try:
            torch.zeros(16, dtype=torch.uint8).view(dtype).view(torch.uint8)
        except (RuntimeError, TypeError):
            continue
        usable.append(dtype)
    return usable


@dataclass(frozen=True)
class Tensor:
    """A tensor of the plan; its bytes follow from `content`."""

    key: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: int

    def make(self) -> torch.Tensor:
        """The tensor."""
        count = self.dtype.itemsize
        for n in self.shape:
            count *= n
        generator = torch.Generator().manual_seed(self.content)
        data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        if self.dtype == torch.bool:
            data &= 1
        return data.view(self.dtype).reshape(self.shape)

    def check(self, got: torch.Tensor, what: str) -> None:
        """Compares type, shape and bytes.

        Raises:
            WrongDataError: they differ.
        """
        what = f"{what} (key {self.key}, {self.dtype}, shape {list(self.shape)})"
        if got.dtype != self.dtype or tuple(got.shape) != self.shape:
            raise WrongDataError(f"{what}: is {got.dtype}, shape {list(got.shape)}")
        difference = first_difference(as_bytes(got), as_bytes(self.make()))
        if difference:
            raise WrongDataError(f"{what}: {difference}")


@dataclass(frozen=True)
class Request:
    """What one worker asks: `pull` has a list for each server."""

    push: list[Tensor]
    pull: list[list[Tensor]]
    pull_keys: list[int]  # for each tensor, or for each position


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, shape [n]."""
    return t.reshape(-1).view(torch.uint8)


def plan(
    seed: int, step: int, workers: int, servers: int, limit: int, dtypes: list[torch.dtype]
) -> list[list[Request]]:
    """The requests of a step: what each worker asks, for each of a few that are under way at the
    same time. No tensor has more than `limit` bytes."""
    draw = random.Random(f"{seed} {step}")
    made = []
    for number in range(draw.randint(1, 3)):
        requests = []
        for worker in range(workers):
            name = f"{seed} {step} {number} {worker}"
            pushes, pulls = draw.choice([(1, 1), (0, 1), (1, 0), (3, 2), (6, 4)])
            keys = draw.sample(range(KEYS), pushes)
            push = [_tensor(draw, key, f"{name} {key}", limit, dtypes) for key in keys]
            by_position = draw.sample(range(KEYS), pulls)
            pull = [
                [_tensor(draw, key, f"{name} {server} {key}", limit, dtypes) for key in by_position]
                for server in range(servers)
            ]
            pull_keys = by_position if draw.random() < 0.5 else by_position * servers
            requests.append(Request(push, pull, pull_keys))
        made.append(requests)
    return made


def _tensor(
    draw: random.Random, key: int, name: str, limit: int, dtypes: list[torch.dtype]
) -> Tensor:
    dtype = draw.choice(dtypes)
    # As many of 1 to 10 bytes as of a tenth of the limit to all of it.
    left = int(limit ** draw.random()) // dtype.itemsize
    shape = []
    for _ in range(draw.randint(0, MAX_DIMS)):
        shape.append(draw.randint(1, max(int(left**0.5), 1)))
        left //= shape[-1]
    if shape and left > 1:
        shape[0] *= left
    draw.shuffle(shape)
    if shape and draw.random() < 0.1:
        shape[draw.randrange(len(shape))] = 0
    return Tensor(key, dtype, tuple(shape), zlib.crc32(name.encode()))


class RandomActor(Actor):
    """One side, with all its nodes driven by one thread."""

    def play(self, seed: int, first: int, count: int, limit: int) -> dict[str, int]:
        """`count` steps from number `first` on; gives what was moved."""
        dtypes = usable_dtypes()
        moved = {"requests": 0, "tensors": 0, "bytes": 0}
        for step in range(first, first + count):
            place = self.places[0]
            steps = plan(seed, step, place.workers, place.servers, limit, dtypes)
            self._step(f"seed {seed}, step {step}", steps, moved)
        return moved

    def _step(self, name: str, step: list[list[Request]], moved: dict[str, int]) -> None:
        raise NotImplementedError


class RandomWorkers(RandomActor):
    """All workers."""

    def _step(self, name: str, step: list[list[Request]], moved: dict[str, int]) -> None:
        waiting: list[Any] = []
        for number, requests in enumerate(step):
            for node, request in zip(self.nodes, requests, strict=True):
                push = [t.make() for t in request.push]
                pull = [t.make() for answers in request.pull for t in answers]
                for t in pull:
                    as_bytes(t).fill_(POISON)
                handle = node.push_pull(
                    push, [t.key for t in request.push], pull, request.pull_keys, need_event=False
                )
                waiting.append((number, node, request, handle, pull))
                moved["requests"] += 1
                moved["tensors"] += len(push) + len(pull)
                moved["bytes"] += sum(t.nbytes for t in push + pull)
        for number, node, request, handle, pull in waiting:
            node.wait(handle, TIMEOUT_MS)
            got = iter(pull)
            for server, answers in enumerate(request.pull):
                for j, want in enumerate(answers):
                    what = (
                        f"{name}, request {number} of worker {node.rank}: "
                        f"answer {j} of server {server}"
                    )
                    want.check(next(got), what)


class RandomServers(RandomActor):
    """All servers."""

    def _step(self, name: str, step: list[list[Request]], moved: dict[str, int]) -> None:
        for number, requests in enumerate(step):
            for server, node in enumerate(self.nodes):
                batch = node.get_batch(timeout_ms=TIMEOUT_MS)
                if len(batch) != len(requests):
                    raise AssertionError(f"{name}: {len(batch)} requests, not {len(requests)}")
                for worker, (handler, tensors, keys) in enumerate(batch):
                    request = requests[worker]
                    what = f"{name}, request {number} of worker {worker} at server {server}"
                    wanted = [t.key for t in request.push]
                    if list(keys) != wanted or len(tensors) != len(wanted):
                        raise WrongDataError(
                            f"{what}: {len(tensors)} tensors with keys {list(keys)}, not {wanted}"
                        )
                    for j, (want, got) in enumerate(zip(request.push, tensors, strict=True)):
                        want.check(got, f"{what}: tensor {j}")
                    answer = [t.make() for t in request.pull[server]]
                    node.respond(answer, handler, need_event=False)
