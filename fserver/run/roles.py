"""Which processes a host runs, and what each finds in its environment. No I/O."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from fserver.command import command

# What the engine takes, and what a cluster has at most.
MAX_GROUPS = 65535  # of a role
MAX_GROUP_SIZE = 1024
MAX_PROCESSES = 65536  # workers and servers together

# Who a process is, which the launcher alone decides, also inside another run.
IDENTITY = {
    "DMLC_ROLE",
    "DMLC_NODE_RANK",
    "DMLC_RANK_OFFSET",
    "DMLC_INSTANCE_ID",
    "STEPMESH_GPU",
    "FSERVER_HOST_SCHEDULER",
}


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process gets of the launcher's own environment."""
    return {name: value for name, value in environment.items() if name not in IDENTITY}


@dataclasses.dataclass(frozen=True)
class Process:
    """One process: its role, rank within the role, command, and the settings added for it."""

    role: str
    rank: int
    command: tuple[str, ...]
    env: dict[str, str]

    @property
    def name(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"

    def __str__(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return f"[{self.name}] {' '.join(words)} {shlex.join(self.command)}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """A cluster, and this host's place in it.

    workers and servers count the groups of the whole cluster. All groups, the
    workers' first, are cut into as many runs as there are hosts, the first ones
    longer by one if they do not divide; host r takes run r, and host 0 also the
    scheduler. A group is never spread over hosts.
    """

    workers: int = 1
    servers: int = 1
    group_size: int = 1
    hosts: int = 1
    host: int = 0

    def groups(self) -> list[tuple[str, int]]:
        """(role, group) of this host."""
        every = [("worker", g) for g in range(self.workers)]
        every += [("server", g) for g in range(self.servers)]
        share, longer = divmod(len(every), self.hosts)
        first = self.host * share + min(self.host, longer)
        return every[first : first + share + (self.host < longer)]


def plan(
    layout: Layout,
    scheduler: tuple[str, int | str],
    commands: dict[str, tuple[str, ...]],
    common: dict[str, str],
    gpus: Mapping[str, Sequence[int]] | None = None,
) -> list[Process]:
    """The processes of this host, the scheduler first.

    scheduler: host and port of the scheduler. commands: of the worker and the
    server. common: settings that all of them get. gpus: by role, the GPU of each
    process of this host in the order of ranks. STEPMESH_GPU, which is part of the
    rank too, is the place in the group without them.
    """
    cluster = {
        "DMLC_NUM_WORKER": str(layout.workers),
        "DMLC_NUM_SERVER": str(layout.servers),
        "DMLC_GROUP_SIZE": str(layout.group_size),
        "DMLC_PS_ROOT_URI": scheduler[0],
        "DMLC_PS_ROOT_PORT": str(scheduler[1]),
        **common,
    }
    processes = []
    if layout.host == 0:
        env = {"DMLC_ROLE": "scheduler", **cluster}
        processes.append(Process("scheduler", 0, tuple(command("scheduler")), env))
    given = {role: iter(of_role) for role, of_role in (gpus or {}).items()}
    for role, group in layout.groups():
        for i in range(layout.group_size):
            rank = group * layout.group_size + i
            gpu = next(given[role]) if given else i
            env = {
                "DMLC_ROLE": role,
                "DMLC_NODE_RANK": str(group),
                "STEPMESH_GPU": str(gpu),
                **({"DMLC_RANK_OFFSET": str(i - gpu)} if gpu != i else {}),
                **cluster,
            }
            processes.append(Process(role, rank, commands[role], env))
    return processes
