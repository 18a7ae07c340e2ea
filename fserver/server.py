"""Server: the node that takes requests and answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ConfigError
from fserver.node import Node, Scheduler, split_address

if TYPE_CHECKING:
    from torch import Tensor

    from fserver import _C
    from fserver.aio import Loops
    from fserver.channel import Channel

__all__ = ["Server"]


class Server(Node):
    """A node that takes requests, one of each worker at a time, and answers them.

    It takes the arguments of ``Node``.

    Example:
        ```python
        with fserver.Server(scheduler="10.0.0.1:7000") as server:
            for handler, tensors, keys in server.get_batch():
                server.respond([tensors[0] * 2], handler)
        ```
    """

    _node: _C.Server
    _role = "server"
    _methods = (
        "barrier",
        "get_batch",
        "worker_of",
        "respond",
        "fail",
        "respond_vec",
        "register_recv_buffer",
    )

    _peers = "worker"
    _hosted: Scheduler | None = None

    def _count(self) -> int:
        return self.workers

    def _open(self, settings: dict[str, str]) -> None:
        hosts = settings.pop("FSERVER_HOST_SCHEDULER", "").strip()
        if hosts.lower() not in ("", "0", "1", "off", "on"):
            raise ConfigError(f"FSERVER_HOST_SCHEDULER={hosts!r}: want 0, 1, off or on")
        if hosts.lower() in ("1", "on"):
            own = {**settings, "FSERVER_HOST_SCHEDULER": "0"}
            self._hosted = Scheduler._of(own)
            host, port = split_address(self._hosted.scheduler)
            settings = {**settings, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
        try:
            super()._open(settings)
        except BaseException:
            if self._hosted is not None:  # its port is free again
                self._hosted.close()
            raise

    @property
    def scheduler(self) -> str:
        """The ``"host:port"`` of the scheduler that this server hosts, for the other nodes.

        To hand it out before the cluster is complete, open the server with ``connect=False``.

        Raises:
            ClosedError: this server hosts no scheduler.
        """
        if self._hosted is None:
            raise ClosedError("this server hosts no scheduler (open it with host_scheduler=True)")
        return self._hosted.scheduler

    def stop(self) -> None:
        """Leaves the cluster together with all other nodes, and closes this one and its scheduler.

        As ``Node.stop`` otherwise. If that raises, the scheduler is closed at once.
        """
        try:
            super().stop()
        except BaseException:
            if self._hosted is not None:  # it would wait for the others without a limit
                self._hosted.close()
            raise
        if self._hosted is not None:
            self._hosted.stop()

    def close(self) -> None:
        """Closes this node, and the scheduler that it hosts, at once; as ``Node.close``."""
        super().close()
        if self._hosted is not None:
            self._hosted.close()

    def channel(
        self,
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        *,
        push: Sequence[Tensor] | None = None,
        mode: str = "kernel",
        name: str | None = None,
        device: Any = None,
        timeout_ms: float = 30000,
        tune: bool = False,
    ) -> Channel:
        """Opens a stream channel with all workers, each of which calls ``channel`` too.

        ``recv()`` fills the tensors that the workers push: ``tensors[i][j]`` of the channel is the
        one with ``push_keys[j]`` of worker i. ``send()`` sends the pull tensors. Both enqueue on
        the current stream and can be captured in a CUDA graph. The channel keeps the tensors alive.

        Args:
            push_keys: P keys, in the order of the workers' ``push``.
            pull: ``workers * Q`` tensors. ``pull[i * Q + j]`` goes to worker i as its tensor j.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            push: ``workers * P`` tensors to receive in, those of worker 0 first. None: the channel
                makes them.
            mode: as for ``Worker.channel``, and the same on both sides.
            name: as for ``Worker.channel``, and the same on both sides.
            device: where the channel makes tensors, and where all given tensors are: the CPU or the
                node's GPU (any GPU if the node's backend is CPU). ``"cuda"`` means the node's GPU
                (the current one if the backend is CPU). None: the device of the given tensors;
                without any, a GPU as with ``"cuda"`` if the workers' tensors are on GPUs and there
                is one, else the CPU.
            timeout_ms: limit of opening, and of each wait on a stream, in milliseconds.
            tune: as for ``Worker.channel``, and the same on both sides.

        Returns:
            The channel, open on all sides.

        Raises:
            ConfigError: an argument is wrong, or the sides differ; the text says where. Or the
                current stream is being captured into a graph: open the channel before that.
            ShapeError: counts or shapes are wrong, or the sides differ.
            TimeoutError: a worker has not opened its side in time.
            PeerLostError: a worker is gone.
        """
        from fserver.channel.channel import How
        from fserver.channel.describe import mode_named

        opener = self._opener()
        with opener.called(name) as called:
            how = How(mode_named(mode), called, timeout_ms, tune)
            return opener.server(push_keys, pull, pull_keys, push, device, how)

    def get_batch(
        self, timeout_ms: float | None = None, at_least: int | None = None
    ) -> list[tuple[int, list[Tensor], list[int]]]:
        """Takes one request of each worker group, and waits until there is one of each.

        Args:
            timeout_ms: limit in milliseconds; None: no limit.
            at_least: 1 to the number of worker groups: return as soon as so many groups have a
                request, with one request of each group that has one, and do not wait for groups
                that are idle or gone. ``worker_of`` returns whose a request is. None: wait for all
                groups.

        Returns:
            A list of ``(handler, tensors, keys)`` in the order of the worker ranks; an empty list
            if the limit is over. Each handler is for one ``respond`` or ``fail``.

            The tensors are views of the receive buffers, on the node's GPU with backend GPU, and
            any stream may use them. A tensor is valid until the next push of its key by that worker
            arrives, which is not before the answer. So send the answer after the kernels that read
            the tensor (need_event of ``respond``).

            A tensor that the worker has in shared memory (``fserver.empty_shared``) is a view of
            that memory, on the CPU also with backend GPU. It is valid until the request is
            answered, and for reading alone: writing to it ends this process with SIGSEGV. Clone
            what is to be changed in place, or set ``FSERVER_LOANS=0``.

            Delete the list and what was made of it when all is answered. Variables that hold it
            until the next batch delay the answers of that batch while the old one is freed.

        Raises:
            ClosedError: a worker has left, so that there will be no further batch (with at_least:
                so many have left that fewer remain). Call ``stop()``, which waits for the other
                nodes and reports a lost one. Once all workers have left, the server may also end
                without it: by ``close()``, by the end of the process, or by dropping the object.
            PeerLostError: a worker is gone, and no other process has taken its rank. The requests
                of the others stay, and can be taken with at_least.
            ShapeError: at_least is more than there are worker groups. A request that this process's
                torch cannot hold is in no batch: its worker gets a ShapeError.
            ConfigError: at_least or timeout_ms is not a number, or at_least is 0.
        """
        return self._node.get_batch(timeout_ms, at_least)

    async def get_batch_async(
        self, timeout_ms: float | None = None, at_least: int | None = None
    ) -> list[tuple[int, list[Tensor], list[int]]]:
        """Takes a batch as ``get_batch`` does, without blocking the asyncio event loop.

        It uses no thread. Cancelling it loses no batch. Several coroutines, of several event loops
        too, may call it at the same time: each gets another batch.

        Args:
            timeout_ms: limit in milliseconds; None: no limit.
            at_least: as for ``get_batch``.

        Returns:
            As ``get_batch``: a list of ``(handler, tensors, keys)``; an empty list if the limit is
            over.

        Raises:
            Error: the errors of ``get_batch``.

        Example:
            ```python
            while True:
                for handler, tensors, keys in await server.get_batch_async():
                    server.respond([tensors[0] * 2], handler)
            ```
        """
        return await self._waiting().get_batch(timeout_ms, at_least)

    def _waiting(self) -> Loops:
        if self._loops is None:
            from fserver.aio import Loops

            # Another thread may be here too, and both have to wait for one.
            loops: Loops = self.__dict__.setdefault("_loops", Loops(self._node))
            return loops
        return self._loops

    _loops: Loops | None = None

    def worker_of(self, handler: int) -> int:
        """Returns the rank of the worker that has sent a request.

        Args:
            handler: of ``get_batch``, not answered yet.

        Raises:
            ShapeError: no request with this handler waits for an answer.
        """
        return self._node.worker_of(handler)

    def respond(self, tensors: Sequence[Tensor], handler: int, need_event: bool = True) -> None:
        """Answers a request, once.

        Returns at once. The tensors are kept alive until they have been sent. Do not change them
        before that: until the worker's next request has come, for instance.

        Args:
            tensors: Q contiguous tensors, in the order of the worker's pull tensors, each with as
                many bytes and of the same dtype. Empty for a request that pulls nothing.
            handler: of ``get_batch``.
            need_event: on a node with a GPU, send after what is queued on the current stream, so
                after the kernels that fill them. False: send at once, because they are filled
                already.

        Raises:
            ShapeError: count, sizes or dtypes do not fit, or the handler does not wait for an
                answer. The dtype is not compared if the worker uses ``fserver_lib``.
            LimitError: 4,096 answers have not left this server, and none has left within a second,
                because their workers take none. The request is not answered; call again later.
            PeerLostError: the worker is gone.
        """
        self._node.respond(tensors, handler, need_event)

    def fail(self, handler: int, text: str) -> None:
        """Refuses a request. At its worker, ``wait`` raises RefusedError with the text.

        It takes the place of ``respond``: the keys of the request are free for the next push, and
        the tensors of ``get_batch`` are not valid any more. Where a worker has several servers, the
        others need not answer requests that they have not taken.

        Args:
            handler: of ``get_batch``.
            text: the reason. The first 500 bytes of its UTF-8 travel. A run of white space becomes
                one space.

        Raises:
            ShapeError: the handler does not wait for an answer.
            ConfigError: text is not a str.
            PeerLostError: the worker is gone.
        """
        self._node.fail(handler, text)

    def respond_vec(
        self,
        ret_buffer: Tensor,
        tensors_vec: Sequence[Sequence[Tensor] | Tensor],
        handler_vec: Sequence[int],
    ) -> None:
        """Answers several requests of one pull tensor each with the rows of one tensor.

        A tensor on the GPU is sent after what is queued on the current stream, as by ``respond``
        with need_event=True.

        Args:
            ret_buffer: a contiguous tensor with at least one dimension. Handler k gets the rows
                behind those of handlers 0 to k-1, as many as ``tensors_vec[k]`` has. If it has too
                few rows for all, every handler gets the rows from 0 on.
            tensors_vec: for each request a list of tensors, of which the first counts, or a tensor.
            handler_vec: as many handlers of ``get_batch``.

        Raises:
            ShapeError: counts, sizes or dtypes do not fit. The requests before the bad one have
                been answered.
        """
        self._node.respond_vec(ret_buffer, tensors_vec, handler_vec)

    def register_recv_buffer(
        self, tensor: Tensor, worker_ranks: Sequence[int], push_keys: Sequence[int]
    ) -> None:
        """Receives pushed tensors in memory of the caller's.

        Call it before the first push of these keys; a barrier of all nodes after it makes sure of
        that. A worker that is started again pushes into the slices of the lost one, whether or not
        the last request of that one has been answered.

        Args:
            tensor: a contiguous tensor, kept until the node is closed. It is cut into
                ``len(worker_ranks)`` slices of equal bytes.
            worker_ranks: slice i receives from worker ``worker_ranks[i]``. A rank may repeat.
            push_keys: slice i receives key ``push_keys[i]``. The keys of one rank are distinct.

        Raises:
            ShapeError: the bytes do not divide, counts differ, there is no such worker, or a key
                has been pushed or has memory already. Nothing is registered then.
            ConfigError: the tensor cannot be written to, or shares memory with a registered one.
        """
        self._node.register_recv_buffer(tensor, worker_ranks, push_keys)
