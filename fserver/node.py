"""Node: what workers, servers and schedulers have in common, and Scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from fserver import _loader
from fserver.errors import ConfigError, Error
from fserver.link import Link, LinkMember, linked
from fserver.settings import VARIABLES, check_names, merged, texts

if TYPE_CHECKING:
    from typing_extensions import Self

    from fserver import _C
    from fserver.channel.opener import Opener


def split_address(scheduler: str) -> tuple[str, str]:
    """Returns host and port of ``"host:port"``."""
    if not isinstance(scheduler, str):
        raise ConfigError(f'scheduler is {scheduler!r:.80}, want "host:port"')
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


def _torch_has_gpus() -> bool:
    """Whether this build of torch can use GPUs at all."""
    import torch

    return bool(torch.backends.cuda.is_built())


class Node:
    """What workers, servers and schedulers have in common.

    All arguments are keyword arguments. An argument that is not given is taken from the
    environment, then from the default. ``fserver env`` prints all settings.

    A node is a context manager: leaving the block stops the node, or closes it if the block raised.
    All methods may be called from several threads.

    Args:
        scheduler: address of the scheduler, ``"host:port"``.
        workers: number of worker groups (default 1).
        servers: number of server groups (default 1).
        group_size: number of nodes in a group (default 1).
        node_rank: index of this node's group within its role. -1: the scheduler assigns the
            lowest free one, and the place of a lost node if there is one. The default is -1 if
            there are several groups of one node, and neither ``gpu`` nor ``rank_offset`` is given;
            else 0.
        gpu: index of this node within its group, and of its GPU (default 0). The rank is
            ``group_size * node_rank + gpu + rank_offset``.
        rank_offset: added to the rank and to the instance (default 0).
        instance: the rail (default ``gpu + rank_offset``). A node talks to the nodes of the other
            role that have the same instance.
        host: address of this host that other nodes use.
        interface: network interface of this host to use, in place of ``host``.
        port: port to listen on; 0: any free port.
        transport: how tensors travel (default ``"auto"``: the best that reaches each peer).
        progress: who moves the data. ``"caller"``: the threads that wait. ``"thread"``: a thread of
            the engine. ``"auto"`` (default): by the number of free cores.
        backend: where tensors are, ``"CPU"`` or ``"GPU"``.
        host_scheduler: a server runs the scheduler too, in its process. The scheduler's port may be
            0, any free port.
        cluster: id of the cluster. Nodes with another id are refused.
        secret: shared secret. Nodes prove to each other that they know it.
        tls: encrypt what travels over TCP, control and data (default False). Certificates are
            derived from the secret unless FSERVER_TLS_CERT and the settings beside it name others.
            All nodes need the same value.
        init_timeout: limit for completing the cluster, in seconds (default 60).
        on_peer_lost: what a call does when it needs a node that is lost. ``"raise"`` (default): it
            raises PeerLostError until another process has taken that rank. ``"wait"``: it waits for
            that process. Unanswered requests are sent to the new process again, so an application
            may see a request twice, but only across a restart.
        rejoin_timeout: limit of ``"wait"``, in seconds from the loss (default 60). A scheduler
            whose members are all lost stays for as long.
        settings: other settings, by their names in the environment. A value of None is as if the
            name were not there.
        connect: True: return when the cluster is complete. False: return at once; call
            ``connect()``.

    Raises:
        ConfigError: a setting is wrong. The text has its name, its value and what is allowed.
        TimeoutError: the cluster was not complete in time.
    """

    _role: str
    _methods: tuple[str, ...]  # that _open() puts the extension's in the place of,
    _own: ClassVar[dict[str, Any]]  # as the class has them that names them

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_methods" in vars(cls):
            cls._own = {name: getattr(cls, name) for name in cls._methods}

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
        given = {name: value for name, value in locals().items() if name in VARIABLES}
        arguments = {} if settings is None else texts(settings)
        check_names(arguments)
        arguments |= texts({VARIABLES[name]: value for name, value in given.items()})
        if scheduler is not None:
            at, root_port = split_address(scheduler)
            arguments |= {"DMLC_PS_ROOT_URI": at, "DMLC_PS_ROOT_PORT": root_port}
        self._open(merged(arguments))
        if connect:
            self.connect()

    @classmethod
    def from_env(cls, *, connect: bool = True) -> Self:
        """Opens a node whose settings all come from the environment, as a launcher sets them.

        Args:
            connect: as for the constructor.

        Raises:
            ConfigError: a setting is wrong.
            TimeoutError: the cluster was not complete in time.
        """
        return cls(connect=connect)

    def _open(self, settings: dict[str, str]) -> None:
        settings = {**settings, "DMLC_ROLE": self._role}
        extension = self._load()
        said = settings.get("STEPMESH_BACKEND") or settings.get("STEPMESH_BAKCEND")
        if not said and self._role != "scheduler" and not _torch_has_gpus():
            settings["STEPMESH_BACKEND"] = "CPU"
        lines = [f"{name}={value}" for name, value in settings.items()]
        self._node = self._make(extension, lines)
        # Callers reach the extension without a frame of Python in between: 70 ns a call. Methods of
        # a subclass of theirs, and what they have put in the place of a method, stay.
        for name, method in self._own.items():
            if getattr(type(self), name) is method:
                setattr(self, name, getattr(self._node, name))

    _load = staticmethod(_loader.load)

    def _make(self, extension: ModuleType, lines: list[str]) -> _C.Node:
        node: _C.Node = getattr(extension, self._role.capitalize())(lines)
        return node

    def connect(self) -> None:
        """Waits until all nodes of the cluster are connected.

        The constructor does this unless it was called with ``connect=False``. Does nothing if the
        node is connected.

        Raises:
            TimeoutError: the cluster was not complete within ``init_timeout`` seconds. The text
                names the address that was tried and the failure, or the missing nodes. The node is
                closed.
            PeerLostError: a node left again.
        """
        if self._node.connected:
            return
        try:
            self._node.connect()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Leaves the cluster together with all other nodes, and closes this node.

        Waits until the others stop too, at most FSERVER_STOP_TIMEOUT seconds. Does nothing if the
        node is closed.

        Raises:
            PeerLostError: another node was lost instead of stopping. This one is closed.
            TimeoutError: the others did not stop in time. This one is closed.
        """
        if self._channels is not None:
            self._channels.close()
        try:
            self._node.stop()
        finally:  # the peers have left
            if self._channels is not None:
                self._channels.close()

    def close(self) -> None:
        """Closes this node at once.

        Calls that wait in other threads or event loops raise ClosedError. For the other nodes this
        one is lost, unless it is a server whose workers have all left. A scheduler whose members
        are leaving waits for them, at most a second. Does nothing if the node is closed.
        """
        self._node.close()
        if self._channels is not None:
            self._channels.close()

    _channels: Opener | None = None

    def _opener(self) -> Opener:
        """What opens the channels of this node."""
        if self._channels is None:
            from fserver.channel.opener import Opener

            # Another thread may be here too, and names have to come from one.
            opener: Opener = self.__dict__.setdefault("_channels", Opener(self._node))
            return opener
        return self._channels

    def barrier(
        self,
        include_server: bool,
        include_client: bool,
        instance_barrier: bool = True,
        timeout_ms: float | None = None,
    ) -> None:
        """Waits until every node of the named roles has called ``barrier``.

        Args:
            include_server: servers take part.
            include_client: workers take part.
            instance_barrier: True: every instance calls it. False: one instance of each group does.
            timeout_ms: limit in milliseconds; None: FSERVER_BARRIER_TIMEOUT.

        Raises:
            TimeoutError: not all nodes called it in time.
            PeerLostError: any node of the cluster, or the scheduler, is gone, also one that does
                not take part. Barriers are counted anew then. With on_peer_lost="wait" a barrier
                waits for the replacement. One that is called while there is no scheduler waits for
                the next scheduler.
        """
        self._node.barrier(include_server, include_client, instance_barrier, timeout_ms)

    def describe(self) -> dict[str, Any]:
        """Returns facts about the node as a dict.

        Returns:
            ``role``, ``rank``, ``group``, ``instance``, ``address``; ``fabrics``, the transports
            that are open; ``links``, one dict with the fields of ``Link`` for each connection; and
            counters since the node was opened: ``push_pulls``, ``requests``, ``responses``,
            ``bytes_out``, ``bytes_in``, ``loans`` (tensors pushed by reference), ``sleeps``.

        Raises:
            ClosedError: the node is closed.
        """
        described: dict[str, Any] = json.loads(self._node.describe())
        return described

    def links(self) -> list[Link]:
        """Returns the connections to the peers, and how tensors travel to each.

        A peer that is lost is not listed. The call does not slow down other calls.

        Raises:
            ClosedError: the node is closed.
        """
        links = []
        for link in self.describe()["links"]:
            link["members"] = tuple(LinkMember(**member) for member in link["members"])
            links.append(Link(**link))
        return links

    @property
    def rank(self) -> int:
        """The number of the node within its role.

        If the scheduler assigns it, it is -1 until the node is connected.
        """
        return self._node.rank

    @property
    def group(self) -> int:
        """The index of the node's group within its role. As ``rank``."""
        return self._node.group

    @property
    def instance(self) -> int:
        """The rail: the node talks to the nodes of the other role that have the same instance."""
        return self._node.instance

    @property
    def workers(self) -> int:
        """The number of worker groups: a full batch has as many requests."""
        return self._node.workers

    @property
    def servers(self) -> int:
        """The number of server groups: a push_pull gets answers from as many servers."""
        return self._node.servers

    @property
    def device(self) -> str:
        """The node's GPU as torch names it, ``"cuda:1"``; ``"cpu"`` if its backend is CPU."""
        gpu = self._node.device
        return "cpu" if gpu < 0 else f"cuda:{gpu}"

    @property
    def address(self) -> str:
        """Where other nodes reach this one, ``"10.0.0.1:7000"``; empty if nowhere."""
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
        return f"<fserver.{type(self).__name__} {self.rank}: {self._state()}>"

    def _state(self) -> str:
        """What the node does, for people."""
        try:
            if self.closed:
                return "closed"
            if not self._node.connected:
                return f"not connected yet{self.address and f', at {self.address}'}"
            if not self._peers:
                return f"open at {self.address}"
            return linked(self._peers, self._count(), self.links())
        except Error:  # it is being closed
            return "closed"

    _peers = ""

    def _count(self) -> int:
        return 0


class Scheduler(Node):
    """The node that introduces workers and servers to each other.

    It takes the arguments of ``Node``. It carries no tensors, and imports no torch.

    Example:
        ```python
        with fserver.Scheduler(scheduler="10.0.0.1:7000", workers=2, servers=2):
            pass  # leaving the block waits until all others stop
        ```
    """

    _role = "scheduler"
    _methods = ("barrier",)
    _load = staticmethod(_loader.engine)

    @classmethod
    def _of(cls, settings: dict[str, str]) -> Self:
        """Opens one with settings that have been merged with the environment."""
        node = cls.__new__(cls)
        node._open(settings)
        return node

    @property
    def scheduler(self) -> str:
        """The scheduler's ``"host:port"`` for the other nodes, also if the port was 0."""
        return self.address

    def stop(self) -> None:
        """Waits until every other node has left the cluster or is lost, and closes this one.

        The others need the scheduler until then, so there is no time limit: ``close`` ends the
        wait, from another thread. Does nothing if the node is closed.

        Raises:
            PeerLostError: another node was lost instead of leaving. This one is closed.
        """
        super().stop()
