"""Nodes as objects: any number of them, also of different clusters, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ConfigError
from fserver.handle import Handle, handles_of
from fserver.link import Link
from fserver.node import Node, Scheduler, environment, inherited, split_address

if TYPE_CHECKING:
    from torch import Tensor

    from fserver.aio import Loops
    from fserver.channel import Channel

__all__ = ["Link", "Node", "Scheduler", "Server", "Worker", "environment", "inherited"]


class Worker(Node):
    """A node that pushes tensors to all servers and pulls their answers.

    It takes the arguments of ``Node``.

    Example:
        ```python
        with fserver.Worker(scheduler="10.0.0.1:7000") as worker:
            handle = worker.push_pull([x], [0], [y], [0])
            handle.wait(timeout_ms=1000)
        ```
    """

    _role = "worker"
    _methods = ("barrier", "push_pull", "wait", "get_all_handlers", "fetch_trace")

    def push_pull(
        self,
        push_tensors: Sequence[Tensor],
        push_keys: Sequence[int],
        pull_tensors: Sequence[Tensor],
        pull_keys: Sequence[int],
        need_event: bool = True,
    ) -> Handle:
        """Sends P tensors to every server and lets every server write Q answers.

        Returns at once. A lost server is no error here: ``wait`` raises it.

        The tensors are kept alive until the request has completed. Until then:

        - Do not change the pushed tensors, and do not read the pulled ones.
        - A pull tensor belongs to the request, whether or not the request has been waited for.
        - torch refuses to resize any of the tensors. A tensor whose ``resize_`` torch has refused
          has the new shape over the old memory all the same: resize it back.

        All tensors are contiguous, of any dtype and shape, also without rows or dimensions. They
        are on the CPU or, with backend GPU, on the node's GPU; the peers' tensors may be on either.

        Args:
            push_tensors: P tensors. Shapes may change from call to call.
            push_keys: P distinct ints of 0 to 2**64-1: the names of the tensors at the server. A
                key that is pushed again waits until the server has answered its last push.
            pull_tensors: ``servers * Q`` tensors. ``pull_tensors[i * Q + j]`` takes answer j of
                server i.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            need_event: with tensors on the GPU, send after what is queued on the current stream.
                False: send at once, because the pushed tensors are filled already and nothing that
                is queued uses the pull tensors.

        Returns:
            The handle of the request: an int, the first of ``P + servers * Q`` that belong to the
            request, counted from 0. It has ``wait()`` and ``done()`` and can be awaited.

        Raises:
            ConfigError: an argument has the wrong type, device or value, or a pull tensor shares
                memory with one of another request. The text has the handle of that request.
            ShapeError: counts do not fit, a tensor is not contiguous, or the description of all
                tensors (about 10 bytes each, and up to 9 for each dimension) is larger than a
                frame, 1 MiB.
            LimitError: 4,096 push_pulls of this worker have not completed. Wait for one of them,
                then call again.
        """
        return self._node.push_pull(push_tensors, push_keys, pull_tensors, pull_keys, need_event)

    def wait(self, handler: int, timeout_ms: float = 10000) -> None:
        """Returns when all answers of a push_pull have been written.

        Args:
            handler: what ``push_pull`` returned, or any int that belongs to the request. A request
                may be waited for again.
            timeout_ms: limit in milliseconds, counted from this call. 0: only look.

        Raises:
            TimeoutError: the limit is over. The request goes on, and the handle stays valid. The
                text names the server that has not answered, the key, and, if there is one, the
                earlier request that this one waits for: the requests of a worker go to a server in
                the order of the calls, and a key that is pushed again waits for the answer to its
                last push.
            PeerLostError: a server is gone. Every later wait for this handle raises it too. New
                push_pulls succeed when another process has taken the server's rank.
            RefusedError: a server's application has refused the request (``Server.fail``). The
                error has its text.
            ShapeError: a server cannot take a pushed tensor: it is larger than what the server has
                registered for its key, the server's torch has no such dtype, or there are too many
                keys. Other requests are not touched.
            Error: this process lacks memory or descriptors for the request; the text says which.
                The connection is made anew.
            ConfigError: the handle is unknown. The last 4,096 requests are remembered.
        """
        self._node.wait(handler, timeout_ms)

    def channel(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        *,
        mode: str = "kernel",
        name: str | None = None,
        timeout_ms: float = 30000,
        tune: bool = False,
    ) -> Channel:
        """Opens a stream channel with all servers, each of which calls ``channel`` too.

        ``send()`` sends the push tensors to every server; ``recv()`` fills the pull tensors with
        their answers. Both enqueue on the current stream and can be captured in a CUDA graph. The
        channel keeps the tensors alive.

        Args:
            push: P contiguous tensors. All tensors of a channel are on one device: the CPU or the
                node's GPU (any GPU if the node's backend is CPU).
            push_keys: P distinct ints that no other open channel of this worker has.
            pull: ``servers * Q`` tensors. ``pull[i * Q + j]`` takes tensor j of server i.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            mode: how GPUs that reach each other's memory send. ``"kernel"``, by small kernels, has
                the lowest latency. ``"copy"``, by the copy engines, uses no SM. ``"host"`` goes
                through host memory and the engine, over any transport. CPU tensors always go
                through the engine. The former names ``"sm"``, ``"ce"`` and ``"proxy"`` work too.
            name: what both sides call the channel, 1 to 64 bytes of UTF-8. None: unnamed channels
                are numbered in the order in which they are opened. A failed open frees its number.
            timeout_ms: limit of opening, and of each wait on a stream, in milliseconds.
            tune: with mode ``"kernel"``: measure whether packets or flags are faster, and how many
                blocks copy fastest. That takes about a second, and as much memory again meanwhile.
                Set it on all sides or on none, with a name of at most 61 bytes. False: use what was
                measured on H200. ``Channel.table`` says what was chosen.

        Returns:
            The channel, open on all sides.

        Raises:
            ConfigError: an argument is wrong, or the sides differ; the text says where. Or the
                current stream is being captured into a graph: open the channel before that.
            ShapeError: counts or shapes are wrong, or the sides differ.
            TimeoutError: a server has not opened its side in time.
            PeerLostError: a server is gone.
        """
        from fserver.channel.channel import How
        from fserver.channel.describe import mode_named

        opener = self._opener()
        with opener.called(name) as called:
            how = How(mode_named(mode), called, timeout_ms, tune)
            return opener.worker(push, push_keys, pull, pull_keys, how)

    def _make(self, extension: ModuleType, lines: list[str]) -> Any:
        from fserver.aio import Loops

        node = extension.Worker(lines)
        node.give_handles(handles_of(Loops(node)))
        return node

    _peers = "server"

    def _count(self) -> int:
        return self.servers

    def get_all_handlers(self, handler: int) -> list[int]:
        """Returns all ints that belong to a request: one for each pushed tensor and each pull
        tensor.

        Args:
            handler: what ``push_pull`` returned, or any int that belongs to the request.

        Raises:
            ConfigError: the handle is unknown. The last 4,096 requests are remembered.
        """
        return self._node.get_all_handlers(handler)

    def fetch_trace(self, handler: int) -> list[int]:
        """Returns the eight time stamps of a completed request, in nanoseconds.

        Args:
            handler: what ``push_pull`` returned.

        Returns:
            Request started (0), posted (1), received by the server (2), handed to its application
            (3), answer started (4), posted (5), received by the worker (6), completed (7). Stamps 2
            to 5 are by the server's clock, so the time in the network is ``(t[6] - t[1]) - (t[5] -
            t[2])``.

        Raises:
            ShapeError: the request has not completed.
            ConfigError: the handle is unknown. The last 4,096 requests are remembered.
        """
        return self._node.fetch_trace(handler)


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
            self._hosted = Scheduler(settings=own, connect=False)
            host, port = split_address(self._hosted.scheduler)
            settings = {**settings, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
        super()._open(settings)

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

        As ``Node.stop`` otherwise.
        """
        try:
            super().stop()
        finally:
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
            that memory. It is valid until the request is answered, and for reading alone: writing
            to it ends this process with SIGSEGV. Clone what is to be changed in place, or set
            ``FSERVER_LOANS=0``.

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
            return self.__dict__.setdefault("_loops", Loops(self._node))
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
        before
        that: until the worker's next request has come, for instance.

        Args:
            tensors: Q contiguous tensors, in the order of the worker's pull tensors, each with as
                many bytes and of the same dtype. Empty for a request that pulls nothing.
            handler: of ``get_batch``.
            need_event: with tensors on the GPU, send after what is queued on the current stream, so
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
            text: the reason. The first 500 bytes of its UTF-8 travel; line breaks become spaces.

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
