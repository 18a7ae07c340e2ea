"""Opener: opens channels for Worker.channel and Server.channel. It checks the arguments, and gives
the channels of a node their names and keys."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fserver.channel import describe, parting
from fserver.channel.channel import PARTING_S, Channel, How, captured, close_all
from fserver.channel.opening import Opening, ServerOpening, WorkerOpening, gpu_of
from fserver.channel.plan import Table
from fserver.channel.tune import tuned
from fserver.errors import ConfigError, Error, ShapeError

if TYPE_CHECKING:
    from torch import Tensor


def _outside(device: Any) -> None:
    """Refuses to open a channel during the capture of a CUDA graph, because opening allocates and
    waits. Call this before the peers are told of the channel, because they would wait for it.

    Raises:
        ConfigError: the current stream, or that of the tensors' device, is being captured.
    """
    if captured(device):
        raise ConfigError(
            "channel: the current stream is being captured into a CUDA graph, and a channel cannot "
            "be opened during a capture: open the channel before the capture"
        )


class Opener:
    """Opens the channels of one node, names them, and refuses a key that another channel has."""

    def __init__(self, node: Any) -> None:
        self._node = node  # the extension's Worker or Server
        self._lock = threading.Lock()  # of the next three
        self._next = 0  # number of a channel without a name
        self._given_back: set[int] = set()  # those below it that are free
        # Keys go back without the lock: the garbage collector may do that, in a thread that has it.
        self._keys: set[int] = set()
        self._all: weakref.WeakSet[Channel] = weakref.WeakSet()

    def close(self) -> None:
        """Closes all channels that are open."""
        close_all(list(self._all))
        parting.sweep()

    @contextlib.contextmanager
    def called(self, name: str | None) -> Iterator[str]:
        """Yields the name of a channel that is opened in the ``with`` block. An unnamed channel
        gets the lowest free number. If opening fails, the number is free again, so that the two
        sides agree on it even if one of them has to try more often.

        Raises:
            ConfigError: ``name`` is not text that can be sent to the other side.
        """
        if name is not None:
            yield describe.name(name)
            return
        with self._lock:
            number = min(self._given_back, default=self._next)
            self._given_back.discard(number)
            self._next = max(self._next, number + 1)
        try:
            yield str(number)
        except BaseException:
            with self._lock:
                self._given_back.add(number)
            raise

    def worker(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        how: How,
    ) -> Channel:
        """See Worker.channel."""
        push = describe.listed("push", push, "tensors")
        pull = describe.listed("pull", pull, "tensors")
        push_keys = describe.listed("push_keys", push_keys, "ints")
        pull_keys = describe.listed("pull_keys", pull_keys, "ints")
        describe.check("channel", "push", push, push_keys, False)
        describe.check("channel", "pull", pull, pull_keys, True)
        if not push and not pull:
            raise ShapeError("channel: push and pull are both empty: give at least one tensor")
        device = describe.of_one_device({"push": push, "pull": pull}, None, gpu_of(self._node))
        _outside(device)
        if how.tune and how.mode == "kernel":

            def trial(number: str, table: Table) -> Channel:
                other = how.trial(number, table)
                return self.worker(_like(push), push_keys, _like(pull), pull_keys, other)

            how = replace(how, table=tuned(trial, True))
        if len(push_keys) != len(push):
            raise ShapeError(
                f"channel: {len(push_keys)} push_keys for {len(push)} push tensors: give one key "
                "for each tensor"
            )
        servers = self._node.servers
        shares, keys = describe.divided(pull, pull_keys, servers, "server")
        it = WorkerOpening(self._node, self._begin(how, push_keys), how, device, servers)
        with self._opening(it, how, push_keys, True):
            path, reason = it.open(push, push_keys, shares, keys)
            return self._made(it, how, path, reason, push, shares, push_keys, device, True)

    def server(
        self,
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        push: Sequence[Tensor] | None,
        device: Any,
        how: How,
    ) -> Channel:
        """See Server.channel."""
        pull = describe.listed("pull", pull, "tensors")
        push_keys = describe.listed("push_keys", push_keys, "ints")
        pull_keys = describe.listed("pull_keys", pull_keys, "ints")
        push = None if push is None else describe.listed("push", push, "tensors")
        device = describe.device(device)
        describe.check("channel", "pull", pull, pull_keys, False)
        describe.check("channel", "push", push or [], push_keys, True)
        gpu = gpu_of(self._node)
        device = describe.of_one_device({"push": push or [], "pull": pull}, device, gpu)
        _outside(device)
        if how.tune and how.mode == "kernel":

            def trial(number: str, table: Table) -> Channel:
                some, other = (_like(pull), _like(push)), how.trial(number, table)
                return self.server(push_keys, some[0], pull_keys, some[1], device, other)

            how = replace(how, table=tuned(trial, False))
        workers, n = self._node.workers, len(push_keys)
        shares, keys = describe.divided(pull, pull_keys, workers, "worker")
        if push is not None and len(push) != n * workers:
            raise ShapeError(
                f"channel: {len(push)} push tensors for {n} push_keys and {workers} workers: give "
                f"{n * workers} tensors, those of worker 0 first"
            )
        if n + len(pull) == 0:
            raise ShapeError("channel: push_keys and pull are both empty: give at least one tensor")
        it = ServerOpening(self._node, self._begin(how, push_keys), how, device, workers)
        with self._opening(it, how, push_keys, False):
            theirs = it.hear_all()
            device = device or _like_theirs(theirs, gpu)
            into = [
                _as_pushed(i, t, push_keys, device) if push is None else push[i * n : (i + 1) * n]
                for i, t in enumerate(theirs)
            ]
            path, reason = it.open(theirs, device, into, push_keys, shares, keys)
            return self._made(it, how, path, reason, pull, into, push_keys, device, False)

    @contextlib.contextmanager
    def _opening(
        self, it: Opening, how: How, push_keys: Sequence[int], worker: bool
    ) -> Iterator[None]:
        """Opens a channel in the ``with`` block. If the block fails, the peers are told the reason,
        and all resources are dropped. Servers that open their sides later are also told why a
        worker has refused. The tensors that the block makes can be used in and outside of
        torch.inference_mode."""
        import torch

        try:
            with torch.inference_mode(False):
                yield
        except BaseException as error:
            it.refuse(error)
            self._keys.difference_update(push_keys)
            why = describe.lasting(how.mode, error) if worker else ""
            shown = it.direct and it.shown  # then a peer may write here until it closes its side
            try:
                wait_ms = PARTING_S * 1e3 if it.side else 0
                self._node.channel_close(it.handle, wait_ms, why, not shown)
            finally:
                if shown:
                    parting.close_gpu(self._node, it.handle, how.name, it.side)
                elif it.side:
                    it.side.close()
            raise

    def _begin(self, how: How, push_keys: Sequence[int]) -> int:
        """Returns the node's number of a new channel."""
        if how.mode not in describe.MODES:
            raise ConfigError(
                f"channel: mode is {how.mode!r}, want one of {', '.join(describe.MODES)}"
            )
        if len(set(push_keys)) != len(push_keys):
            twice, _ = Counter(push_keys).most_common(1)[0]
            raise ConfigError(
                f"channel: push_keys has key {twice} twice: give each tensor a key of its own"
            )
        with self._lock:
            taken = self._keys.intersection(push_keys)
            if taken:
                raise ConfigError(
                    f"channel: another open channel of this node has key {min(taken)}: give each "
                    "channel keys of its own, or close the other channel first"
                )
            self._keys.update(push_keys)
        try:
            parting.wait(self._node, how.name, how.timeout_ms)
            handle: int = self._node.channel_open(how.name)
        except BaseException:
            self._keys.difference_update(push_keys)
            raise
        return handle

    def _made(
        self,
        it: Opening,
        how: How,
        path: str,
        reason: str,
        out: Sequence[Tensor],
        tensors: Sequence[Sequence[Tensor]],
        keys: Sequence[int],
        device: Any,
        send_first: bool,
    ) -> Channel:
        free = self._keys.difference_update
        channel = Channel(
            self._node, it.handle, how, it.side, path, reason, out, tensors, device, send_first,
            lambda: free(keys),
        )  # fmt: skip
        self._all.add(channel)
        return channel


def _zeros(shape: Sequence[int], dtype: Any, device: Any, what: str) -> Tensor:
    import torch

    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise Error(
            f"channel: cannot allocate a tensor of shape {list(shape)} and {dtype} on {device} "
            f"{what}: {text} (free memory there, or use smaller tensors)"
        ) from error


def _like(tensors: Any) -> Any:
    """Returns zeros of the same shapes."""
    if tensors is None:
        return None
    return [_zeros(t.shape, t.dtype, t.device, "for the trials of tune=True") for t in tensors]


def _like_theirs(theirs: Sequence[dict[str, Any]], gpu: Any) -> Any:
    """Returns the device for a server that names none. If the tensors of all workers are on GPUs
    and this process sees a GPU, it is the node's GPU, or, with backend CPU, the current GPU.
    Otherwise it is the CPU."""
    import torch

    if torch.cuda.is_available() and all(t["device"].startswith("cuda") for t in theirs):
        return gpu or torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _as_pushed(
    worker: int, theirs: dict[str, Any], push_keys: Sequence[int], device: Any
) -> list[Tensor]:
    """Returns tensors that can hold what a worker pushes."""
    import torch

    keys = [key for key, _, _ in theirs["out"]]
    if keys != push_keys:
        raise ShapeError(
            f"channel: push_keys are {push_keys} here, but worker {worker} pushes {keys}: give the "
            "same keys on both sides"
        )
    what = f"for the pushes of worker {worker}"
    return [_zeros(shape, getattr(torch, dtype), device, what) for _, dtype, shape in theirs["out"]]
