"""Lets CUDA streams wait for requests and batches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from fserver import _loader
from fserver.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def _run(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    """Does jobs, until there is a None."""
    while (job := jobs.get()) is not None:
        future, call = job
        try:
            future.set_result(call())
        except BaseException as error:  # whoever asks for it is told
            future.set_exception(error)
        del job, future, call  # what they hold is not held until the next


class Notify:
    """Lets CUDA streams wait for push_pulls and batches, without blocking the caller.

    A stream waits for a number in pinned memory. One thread of the object waits for what the
    streams are to wait for, in the order of the calls, and raises the number when it has come or
    has failed. Only ``wait_event_done`` and ``get_future_batch_data`` block, and they raise what
    went wrong. A stream that is being captured into a CUDA graph cannot wait in this way.

    Args:
        wait: called in the thread with a handle; returns when the push_pull has completed.
        get_batch: called in the thread; returns the next batch.
    """

    def __init__(self, wait: Callable[[int], None], get_batch: Callable[[], Any]) -> None:
        self._wait, self._get_batch = wait, get_batch
        self._flag: Tensor | None = None
        self._seen: dict[int, Tensor] = {}  # it, as a GPU sees it
        self._asked = 0
        self._event: Future[None] | None = None
        self._batch: Future[Any] | None = None

    def init(self) -> None:
        """Takes the pinned memory and starts the thread. Call it once, before the other methods.

        Raises:
            ConfigError: torch sees no GPU.
        """
        import torch

        if self._flag is None:
            if not torch.cuda.is_available():
                raise ConfigError(
                    "SimpleNotify.init: torch sees no GPU, and what waits is a stream of one: "
                    "call wait() or get_batch() instead"
                )
            flag = torch.zeros(1, dtype=torch.int64).pin_memory()
            self._jobs: SimpleQueue[Any] = SimpleQueue()
            # A daemon: the process can end while a batch is waited for.
            threading.Thread(
                target=_run, args=(self._jobs,), name="fserver-notify", daemon=True
            ).start()
            weakref.finalize(self, self._jobs.put, None)
            self._flag = flag  # without the thread, streams would wait for ever

    def _memory(self, call: str) -> Tensor:
        if self._flag is None:
            raise ConfigError(f"{call}: call init() first")
        return self._flag

    def _block(self, call: str, number: int) -> None:
        """The current stream waits for a number."""
        import torch

        flag, gpu, load = self._memory(call), torch.cuda.current_device(), _loader.load
        if gpu not in self._seen:  # so the engine knows which GPUs have streams that may wait
            self._seen[gpu] = load().map_pinned_tensor(flag, gpu)
        load().wait_value(self._seen[gpu], number)

    def _after(self, call: str, job: Callable[[], Any]) -> Future[Any]:
        """Makes the current stream wait for a job that the thread does."""
        number = self._asked + 1
        self._block(call, number)
        self._asked = number
        flag, set_word = self._memory(call), _loader.load().set_word

        def run() -> Any:
            try:
                return job()
            finally:
                set_word(flag, number)  # and flag is kept for all that waits for it

        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # the stream waits: it cannot be taken back
        self._jobs.put((future, run))
        return future

    def stream_wait_event(self, handler: int) -> None:
        """Makes the current stream wait until a push_pull has completed.

        Args:
            handler: what ``push_pull`` returned.

        Raises:
            ConfigError: ``init`` has not been called.
        """
        self._event = self._after("stream_wait_event", lambda: self._wait(handler))

    def wait_event_done(self) -> None:
        """Waits until the push_pull of the last ``stream_wait_event`` has completed.

        Raises:
            Error: the errors of ``wait``.
        """
        if self._event is not None:
            self._event.result()

    def block_now_stream(self) -> None:
        """Makes the current stream wait, too, for what was asked for last. If that has come
        already, the stream waits for what is asked for next.

        Raises:
            ConfigError: ``init`` has not been called.
        """
        flag = self._memory("block_now_stream")
        self._block("block_now_stream", self._asked + (int(flag) >= self._asked))

    def block_now_stream_and_get_batch(self) -> None:
        """Makes the current stream wait for the next batch, which the thread takes.

        Raises:
            ConfigError: ``init`` has not been called.
        """
        self._batch = self._after("block_now_stream_and_get_batch", self._get_batch)

    def get_future_batch_data(self) -> Any:
        """Returns the batch of the last ``block_now_stream_and_get_batch``, and waits for it.

        Returns:
            As ``get_batch``.

        Raises:
            ConfigError: no batch has been asked for.
            Error: the errors of ``get_batch``.
        """
        if self._batch is None:
            raise ConfigError("get_future_batch_data: no batch has been asked for")
        return self._batch.result()
