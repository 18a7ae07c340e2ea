"""Nodes as objects: any number of them, also of different clusters, in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from fserver import _loader
from fserver.errors import ClosedError, ConfigError
from fserver.handle import Handle, handles_of

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from fserver.aio import Loops
    from fserver.channel import Channel

_PREFIXES = ("DMLC_", "STEPMESH_", "STEPAF_", "BYTEPS_", "PS_", "FSERVER_")

_VARIABLES = {
    "workers": "DMLC_NUM_WORKER",
    "servers": "DMLC_NUM_SERVER",
    "group_size": "DMLC_GROUP_SIZE",
    "node_rank": "DMLC_NODE_RANK",
    "gpu": "STEPMESH_GPU",
    "rank_offset": "DMLC_RANK_OFFSET",
    "instance": "DMLC_INSTANCE_ID",
    "host": "DMLC_NODE_HOST",
    "interface": "DMLC_INTERFACE",
    "port": "DMLC_PORT",
    "transport": "FSERVER_TRANSPORT",
    "progress": "FSERVER_PROGRESS",
    "backend": "STEPMESH_BACKEND",
    "host_scheduler": "FSERVER_HOST_SCHEDULER",
    "cluster": "FSERVER_CLUSTER",
    "secret": "FSERVER_SECRET",
    "tls": "FSERVER_TLS",
    "init_timeout": "FSERVER_INIT_TIMEOUT",
    "on_peer_lost": "FSERVER_ON_PEER_LOST",
    "rejoin_timeout": "FSERVER_REJOIN_TIMEOUT",
}


def environment() -> dict[str, str]:
    """The settings in the environment of this process."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and name != "FSERVER_ARCHIVE"  # which is for the build
    }


def inherited() -> dict[str, str]:
    """What a node takes from the environment: ``environment()``, which GPUs CUDA shows, and the
    names of all other variables, without values, for the engine to see which are misspelt."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    others = {name: "" for name in os.environ if name.isascii() and not name.startswith(_PREFIXES)}
    return {**others, **environment(), **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})}


def _split(scheduler: str) -> tuple[str, str]:
    host, colon, port = scheduler.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isdecimal()):
        raise ConfigError(
            f'scheduler is {scheduler!r}, want "host:port", with an IPv6 address "[::1]:7000"'
        )
    return host, port


class Link(NamedTuple):
    """A connection to a peer of the rail."""

    role: str  # "worker" or "server"
    rank: int
    remote: str  # the peer's address; inside a host its process
    transport: str  # how it travels: "tcp", "tcp/tls", "cma", "cma/staged", "cudaipc"
    reason: str  # why not by each better way; empty if there is none


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


class Node:
    """What workers, servers and schedulers have in common.

    All arguments are keywords. What is not given comes from the environment, then from the
    default; ``fserver env`` prints them all.

    Args:
        scheduler: where the scheduler is, ``"host:port"``.
        workers, servers: number of groups of each role (default 1).
        group_size: nodes in a group (default 1).
        node_rank: index of this node's group within its role (default 0).
        gpu: place in the group, and device (default 0). The rank is
            ``group_size * node_rank + gpu + rank_offset``.
        rank_offset: added to the rank and to the instance (default 0).
        instance: the rail (default ``gpu + rank_offset``).
        host, interface, port: address of this host to use, or interface; port to listen on.
        transport: how bytes travel (default ``"auto"``).
        progress: who moves the data, ``"caller"`` (the threads inside wait and the like),
            ``"thread"`` (one of its own) or ``"auto"`` (default; by the cores that are free).
        backend: where tensors are, ``"CPU"`` or ``"GPU"``.
        host_scheduler: a server runs the scheduler too, in this process. Its port may be 0,
            any free one.
        cluster: nodes of another cluster id are refused.
        secret: what the nodes prove to each other that they know.
        tls: encrypt what goes over TCP, control and data (default False), with certificates that
            are derived from the secret unless FSERVER_TLS_CERT and its relatives name others. The
            same on all nodes.
        init_timeout: seconds until the cluster must be complete (default 60).
        on_peer_lost: what calls do that need a node that is lost: ``"raise"`` PeerLostError
            (default), until a process has taken its rank again, or ``"wait"`` for that process.
            Then requests that were not answered are sent to it again, so that an application
            may see one twice, but only across a restart.
        rejoin_timeout: seconds that ``"wait"`` waits, from the loss (default 60). A scheduler
            stays for as long when all others are lost.
        settings: any other setting, by its name in the environment.
        connect: wait until the cluster is complete; else call ``connect()``.

    Raises:
        ConfigError: a setting is wrong; the text has its name, its value and what is allowed.
        TimeoutError: the cluster was not complete in time.

    A node is a context manager: a block that ends well stops it, one that fails closes it. All
    methods may be called from several threads.
    """

    _role: str
    _methods: tuple[str, ...] = ("barrier",)

    def __init__(
        self,
        *,
        scheduler: str | None = None,
        workers: int | None = None,
        servers: int | None = None,
        group_size: int | None = None,
        node_rank: int | None = None,
        gpu: int | None = None,
        rank_offset: int | None = None,
        instance: int | None = None,
        host: str | None = None,
        interface: str | None = None,
        port: int | None = None,
        transport: str | None = None,
        progress: str | None = None,
        backend: str | None = None,
        host_scheduler: bool | None = None,
        cluster: str | None = None,
        secret: str | None = None,
        tls: bool | None = None,
        init_timeout: float | None = None,
        on_peer_lost: str | None = None,
        rejoin_timeout: float | None = None,
        settings: Mapping[str, Any] | None = None,
        connect: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _VARIABLES}
        merged = inherited()
        merged.update({name: _text(value) for name, value in (settings or {}).items()})
        merged.update(
            {_VARIABLES[name]: _text(value) for name, value in given.items() if value is not None}
        )
        if scheduler is not None:
            merged["DMLC_PS_ROOT_URI"], merged["DMLC_PS_ROOT_PORT"] = _split(scheduler)
        self._open(merged)
        if connect:
            self.connect()

    @classmethod
    def from_env(cls, *, connect: bool = True) -> Self:
        """A node with all settings from the environment, as the launcher sets them."""
        return cls(connect=connect)

    def _open(self, settings: dict[str, str]) -> None:
        settings = {**settings, "DMLC_ROLE": self._role}
        lines = [f"{name}={value}" for name, value in settings.items()]
        self._node = self._make(_loader.load(), lines)
        # Callers reach the extension without a frame of Python in between: 70 ns a call.
        for name in self._methods:
            setattr(self, name, getattr(self._node, name))

    def _make(self, extension: ModuleType, lines: list[str]) -> Any:
        return getattr(extension, self._role.capitalize())(lines)

    def connect(self) -> None:
        """Waits until all nodes of the cluster are there. The constructor has done it, unless it
        was told ``connect=False``.

        Raises:
            TimeoutError: they were not within ``init_timeout`` seconds. The text says which
                address was tried and what failed, or who is missing. The node is closed.
            PeerLostError: one of them went again.
        """
        if self._node.connected:
            return
        try:
            self._node.connect()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Leaves the cluster together with all other nodes, and closes this one.

        Waits for the others to stop too, at most FSERVER_STOP_TIMEOUT seconds. Does nothing if
        the node is closed.

        Raises:
            PeerLostError: another node was lost instead of stopping. This one is closed.
            TimeoutError: the others did not stop in time. This one is closed.
        """
        if self._channels is not None:
            self._channels.close()
        self._node.stop()

    def close(self) -> None:
        """Closes this node at once; to the others it is lost, unless it is a server whose workers
        have all left. A scheduler whose members are leaving waits for them, for up to a second.
        Calls that wait in other threads end with ClosedError. Does nothing if the node is
        closed."""
        self._node.close()
        if self._channels is not None:
            self._channels.close()

    _channels: Any = None

    def _opener(self) -> Any:
        """What opens the channels of this node."""
        if self._channels is None:
            from fserver.channel.opener import Opener

            # Another thread may be here too, and names have to come from one.
            return self.__dict__.setdefault("_channels", Opener(self._node))
        return self._channels

    def barrier(
        self,
        include_server: bool,
        include_client: bool,
        instance_barrier: bool = True,
        timeout_ms: float | None = None,
    ) -> None:
        """Waits until every node of the named roles has called it.

        Args:
            include_server: servers take part.
            include_client: workers take part.
            instance_barrier: every instance calls it; False: one instance of each group does.
            timeout_ms: limit in milliseconds; None: FSERVER_BARRIER_TIMEOUT.

        Raises:
            TimeoutError: not all came in time.
            PeerLostError: one that was to come is gone, or the scheduler is. Barriers are
                counted anew after that; one that is called while there is no scheduler waits
                for the next.
        """
        self._node.barrier(include_server, include_client, instance_barrier, timeout_ms)

    def describe(self) -> dict[str, Any]:
        """Who the node is, its links and its counters."""
        return json.loads(self._node.describe())

    def links(self) -> list[Link]:
        """The connections to the peers of the rail, and how each travels. Costs the other calls
        nothing."""
        return [Link(**link) for link in self.describe()["links"]]

    @property
    def rank(self) -> int:
        """Number of the node within its role."""
        return self._node.rank

    @property
    def group(self) -> int:
        """Index of the node's group within its role."""
        return self._node.group

    @property
    def instance(self) -> int:
        """The rail: the node talks to the same instance of the other role's groups."""
        return self._node.instance

    @property
    def workers(self) -> int:
        """Worker groups: as many requests are in a batch."""
        return self._node.workers

    @property
    def servers(self) -> int:
        """Server groups: as many answers belong to a push_pull."""
        return self._node.servers

    @property
    def device(self) -> str:
        """The node's GPU as torch names it, ``"cuda:1"``; ``"cpu"`` if its backend is CPU."""
        gpu = self._node.device
        return "cpu" if gpu < 0 else f"cuda:{gpu}"

    @property
    def address(self) -> str:
        """Where other nodes reach this one: ``"tcp:10.0.0.1:7000"``; empty if nowhere."""
        return self._node.address

    @property
    def closed(self) -> bool:
        """Whether the node is closed."""
        return self._node.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops, or closes if the block failed: then the others are not to wait for this node."""
        if kind is None:
            self.stop()
        else:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self._node.connected else "open"
        return f"<fserver.{type(self).__name__} {self.rank} {state}>"


class Scheduler(Node):
    """The node that introduces workers and servers to each other. Arguments: see Node."""

    _role = "scheduler"

    @property
    def scheduler(self) -> str:
        """``"host:port"`` for the other nodes, also if the port was 0 (any free one)."""
        return self.address


class Worker(Node):
    """A node that pushes tensors to all servers and pulls their answers. Arguments: see Node."""

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
        """Sends P tensors to every server, and has every server's Q answers written to Q tensors.

        Returns at once. The tensors are kept alive until the request has completed. Until then, do
        not change those that are pushed and do not read those that are pulled, and torch refuses to
        resize any (one whose ``resize_`` it has refused has the new shape over the old memory all
        the same: resize it back). A pull tensor belongs to the request until that has completed or
        failed, whether or not it has been waited for. All are contiguous tensors of any dtype and
        shape, also of no rows or no dimension, on the CPU or, where the backend is GPU, on the
        node's GPU; the peers' may be on either.

        Args:
            push_tensors: P tensors. Shapes may change from call to call.
            push_keys: P ints of 0 to 2**64-1, distinct: the names of the tensors at the server.
                A key that is pushed again waits until the server has answered it.
            pull_tensors: ``servers * Q`` tensors; ``pull_tensors[i * Q + j]`` takes answer j of
                server i.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            need_event: where one of the tensors is on the GPU, send after what is queued on the
                current stream of that. False: what is pushed is there already, and what is queued
                does not use the pull tensors.

        Returns:
            The handle of the request: an int, the first of ``P + servers * Q`` that are now its
            own, counted from 0. Besides, it has ``wait()`` and ``done()``, and can be awaited.

        Raises:
            ConfigError: an argument is not what it should be, or a pull tensor shares memory with
                one that belongs to another request. The text has the handler of that request.
            ShapeError: counts do not fit, a tensor is not contiguous, or the description of all
                tensors (about 10 bytes each, and up to 9 for each dimension) is more than the
                1 MiB that a frame holds.
            LimitError: 4,096 push_pulls of this worker have not completed. Wait for one of them,
                then call again.

        A server that is gone is no error here: wait raises it.
        """
        return self._node.push_pull(push_tensors, push_keys, pull_tensors, pull_keys, need_event)

    def wait(self, handler: int, timeout_ms: float = 10000) -> None:
        """Returns when all answers of a push_pull have been written.

        Args:
            handler: what push_pull returned. It may be waited for again.
            timeout_ms: limit in milliseconds, counted from this call. 0: only look.

        Raises:
            TimeoutError: the limit is over. The request goes on, the handler stays valid. The text
                says which server has not answered, which key, and which earlier request this
                one is behind, if it is: the requests of one worker go to a server in the order of
                the calls, and a key that is pushed again waits for the answer to its last push.
            PeerLostError: a server is gone; so does every later wait for this handler. When
                another process has taken the server's rank, new push_pulls succeed.
            RefusedError: a server's application has refused the request (``Server.fail``); the
                error has its text.
            ShapeError: a server cannot take a pushed tensor: it is larger than what the server has
                registered for its key, the server's torch has no such dtype, or the keys are too
                many. The other requests are not touched by it.
            Error: this process lacks memory or descriptors for the request, and says for what. The
                connection is made anew.
            ConfigError: no such handler. The last 4,096 requests are remembered.
        """
        self._node.wait(handler, timeout_ms)

    def channel(
        self,
        push: Sequence[Tensor],
        push_keys: Sequence[int],
        pull: Sequence[Tensor],
        pull_keys: Sequence[int],
        *,
        mode: str = "sm",
        name: str | None = None,
        timeout_ms: float = 30000,
        tune: bool = False,
    ) -> Channel:
        """Opens a stream channel with all servers, each of which calls ``channel`` too.

        ``send()`` sends the push tensors to every server, ``recv()`` has their answers in the
        pull tensors. Both enqueue on the current stream and can be captured in a CUDA graph.
        The channel keeps the tensors alive.

        Args:
            push: P contiguous tensors, all tensors of the channel on one device: the CPU or the
                node's GPU; any GPU if the node's backend is CPU.
            push_keys: P distinct ints; no other open channel of this worker has them.
            pull: ``servers * Q`` tensors; ``pull[i * Q + j]`` takes tensor j of server i.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            mode: how GPUs that reach each other's memory send: ``"sm"`` by small kernels (lowest
                latency) or ``"ce"`` by the copy engines (no SM). CPU tensors, and those of
                ``"proxy"``, go through the engine.
            name: what both sides call the channel, 1 to 64 bytes of UTF-8; None: its number among
                those that this node has opened without a name. A failed call does not count.
            timeout_ms: how long opening, and each wait on a stream, may take.
            tune: with mode ``"sm"``, choose between packets and flags, and how many blocks copy, by
                trying: about a second, and as much memory again meanwhile. On all sides or none,
                and with at most 61 bytes of name. False: as measured on H200.
                ``Channel.table`` says what was chosen.

        Raises:
            ConfigError, ShapeError: an argument is wrong, or the sides differ: the text says
                where. Or the current stream is being captured into a graph: open it before that.
            TimeoutError: a server has not opened its side in time.
            PeerLostError: a server is gone.
        """
        from fserver.channel.channel import How

        opener = self._opener()
        with opener.called(name) as called:
            how = How(mode, called, timeout_ms, tune)
            return opener.worker(push, push_keys, pull, pull_keys, how)

    def _make(self, extension: ModuleType, lines: list[str]) -> Any:
        from fserver.aio import Loops

        node = extension.Worker(lines)
        node.give_handles(handles_of(Loops(node)))
        return node

    def get_all_handlers(self, handler: int) -> list[int]:
        """All ints of a request: one for each pushed tensor and each pull tensor."""
        return self._node.get_all_handlers(handler)

    def fetch_trace(self, handler: int) -> list[int]:
        """Eight time stamps of a completed request, in nanoseconds.

        Request started, posted, received by the server, handed to its application; answer
        started, posted, received by the worker, completed. Numbers 2 to 5 (from 0) are by the
        server's clock: time in the network is ``(t[6] - t[1]) - (t[5] - t[2])``.
        """
        return self._node.fetch_trace(handler)


class Server(Node):
    """A node that takes requests, one of each worker at a time. Arguments: see Node."""

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

    _hosted: Scheduler | None = None

    def _open(self, settings: dict[str, str]) -> None:
        hosts = settings.pop("FSERVER_HOST_SCHEDULER", "").strip()
        if hosts.lower() not in ("", "0", "1", "off", "on"):
            raise ConfigError(f"FSERVER_HOST_SCHEDULER={hosts!r}: want 0, 1, off or on")
        if hosts.lower() in ("1", "on"):
            own = {**settings, "FSERVER_HOST_SCHEDULER": "0"}
            self._hosted = Scheduler(settings=own, connect=False)
            host, port = _split(self._hosted.scheduler)
            settings = {**settings, "DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": port}
        super()._open(settings)

    @property
    def scheduler(self) -> str:
        """``"host:port"`` of the scheduler that this server hosts, for the other nodes.

        To hand it out before the cluster is complete, open with ``connect=False``.
        """
        if self._hosted is None:
            raise ClosedError("this server hosts no scheduler (open it with host_scheduler=True)")
        return self._hosted.scheduler

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            if self._hosted is not None:
                self._hosted.stop()

    def close(self) -> None:
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
        mode: str = "sm",
        name: str | None = None,
        device: Any = None,
        timeout_ms: float = 30000,
        tune: bool = False,
    ) -> Channel:
        """Opens a stream channel with all workers, each of which calls ``channel`` too.

        ``recv()`` has the workers' tensors in ``.tensors``: ``tensors[i][j]`` is that with
        ``push_keys[j]`` of worker i. ``send()`` sends the pull tensors.

        Args:
            push_keys: P keys, in the order of the workers.
            pull: ``workers * Q`` tensors; ``pull[i * Q + j]`` goes to worker i as its tensor j.
            pull_keys: a key for each pull tensor, or one for each of the Q positions.
            push: ``workers * P`` tensors to receive in, those of worker 0 first; None: the
                channel makes them.
            mode, name, timeout_ms, tune: as Worker.channel.
            device: where the channel makes them, and where all tensors that are given are: the CPU
                or the node's GPU (any GPU if the node's backend is CPU). ``"cuda"`` is the node's
                GPU (the current one). None: that of the tensors; without any, a GPU as with
                ``"cuda"`` if the workers' tensors are on GPUs and there is one, else the CPU.

        Raises:
            As Worker.channel.
        """
        from fserver.channel.channel import How

        opener = self._opener()
        with opener.called(name) as called:
            how = How(mode, called, timeout_ms, tune)
            return opener.server(push_keys, pull, pull_keys, push, device, how)

    def get_batch(
        self, timeout_ms: float | None = None, at_least: int | None = None
    ) -> list[tuple[int, list[Tensor], list[int]]]:
        """Takes exactly one request of each worker group; waits until there is one of each.

        Args:
            timeout_ms: limit in milliseconds; None: none.
            at_least: 1 to the number of worker groups: do not wait for groups that have nothing
                to ask, or are gone, but take one request of each that has one when at least so
                many have. ``worker_of`` tells whose a request is. None: of all.

        Returns:
            ``(handler, tensors, keys)`` for each worker group, in rank order; an empty list if
            the limit is over. Each handler is for one ``respond`` or ``fail``. A request that
            this process's torch cannot hold is in no batch: its worker gets a ShapeError.
            The tensors are views of the receive buffers: each is valid until
            its worker's next push of that key is taken, which is not before the answer; so an
            answer must not be sent before kernels that read them have run (need_event). They are
            on the node's GPU where the backend is GPU, and any stream may use them. One that
            the worker has in shared memory (``fserver.empty_shared``) is a view of that: valid
            until it is answered, and for reading alone. Writing to it ends this process with
            SIGSEGV, so clone what is to be changed in place, or set ``FSERVER_LOANS=0``.
            Best ``del`` the list and what came of it once all is answered: variables that hold
            it until the next batch have it freed in the way of that batch's answers.

        Raises:
            ClosedError: a worker has left, so there will be no further batch (with at_least, so
                many that fewer are left). Call ``stop()``, which waits for the other nodes and
                says whether one was lost. Once all workers have left, the server may also end
                without it: by ``close()``, by the end of the process, or by dropping the object.
                To the workers that is no loss.
            PeerLostError: a worker is gone, and so it is until another process has taken its
                rank. The requests of the others wait for that, or are taken with at_least.
            ShapeError: at_least is more than there are worker groups.
        """
        return self._node.get_batch(timeout_ms, at_least)

    async def get_batch_async(
        self, timeout_ms: float | None = None, at_least: int | None = None
    ) -> list[tuple[int, list[Tensor], list[int]]]:
        """As ``get_batch``, for an asyncio event loop: other tasks run while it waits.

        It takes no thread. When it is cancelled, no batch is lost. Several coroutines, of several
        event loops too, may call it at the same time: each gets another batch.

        Args:
            timeout_ms: limit in milliseconds; None: none.
            at_least: as in ``get_batch``.

        Returns:
            As ``get_batch``; an empty list if the limit is over.

        Raises:
            Error: as ``get_batch``.

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
        """The rank of the worker whose request has this handler of get_batch.

        Raises:
            ShapeError: no such request is waiting for an answer; ask before respond.
        """
        return self._node.worker_of(handler)

    def respond(self, tensors: Sequence[Tensor], handler: int, need_event: bool = True) -> None:
        """Answers a request, once.

        Returns at once. The tensors are kept alive until they have been sent, and must not be
        changed until then: until the worker's next request is there, for instance.

        Args:
            tensors: Q contiguous tensors, in the order of the worker's pull tensors, each with
                as many bytes and of the same dtype. Empty for a request that pulls nothing: it
                completes that.
            handler: of get_batch.
            need_event: where one of the tensors is on the GPU, send after what is queued on the
                current stream of that, so after the kernels that fill them. False: send at once,
                because they are filled already.

        Raises:
            ShapeError: count, sizes or dtypes do not fit, or the handler is not waiting for an
                answer. The dtype is compared unless the worker uses ``fserver_lib``.
            LimitError: 4,096 answers of this server have not left it, and none has within a second:
                their workers take none. The request is not answered; call again later.
            PeerLostError: the worker is gone.
        """
        self._node.respond(tensors, handler, need_event)

    def fail(self, handler: int, text: str) -> None:
        """Refuses a request: at its worker, wait raises RefusedError with the text.

        It takes the place of respond: the request is answered, its keys are free for the next
        push, and the tensors of get_batch are not valid any more. Where a worker has several
        servers, the others need not answer what they have not taken.

        Args:
            handler: of get_batch.
            text: why. The first 500 bytes of its UTF-8 travel; line breaks become spaces.

        Raises:
            ShapeError: the handler is not waiting for an answer.
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
        """Answers several requests of one pull each with the rows of one tensor.

        A tensor on the GPU is always sent after what is queued on the current stream, as by
        ``respond`` with need_event=True.

        Args:
            ret_buffer: contiguous tensor. Handler k gets the rows after those of handlers 0 to
                k-1, as many as ``tensors_vec[k]`` has. If it has too few rows for all, every
                handler gets those from row 0 on.
            tensors_vec: the tensors of each request, the first of which counts, or a tensor.
            handler_vec: as many handlers of get_batch.

        Raises:
            ShapeError: counts, sizes or dtypes do not fit. The requests before have been answered.
        """
        self._node.respond_vec(ret_buffer, tensors_vec, handler_vec)

    def register_recv_buffer(
        self, tensor: Tensor, worker_ranks: Sequence[int], push_keys: Sequence[int]
    ) -> None:
        """Receives pushed tensors in memory of the caller's.

        To be called before the first push of these keys: a barrier of all nodes after it makes
        sure of that. A worker that is started again pushes into the slices of the one that is
        lost, whether or not its last request has been answered.

        Args:
            tensor: contiguous tensor, kept until the node is closed. It is cut into
                ``len(worker_ranks)`` slices of equal bytes.
            worker_ranks, push_keys: slice i receives ``push_keys[i]`` of worker
                ``worker_ranks[i]``. A rank may repeat; its keys may not.

        Raises:
            ShapeError: the bytes do not divide, counts differ, a worker is not there, or a key
                has been pushed or has memory already. Nothing is registered then.
            ConfigError: the tensor cannot be written to, or shares memory with another one.
        """
        self._node.register_recv_buffer(tensor, worker_ranks, push_keys)
