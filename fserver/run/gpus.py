"""Which GPU each process of this host gets."""

import ctypes
from collections.abc import Mapping, Sequence

from .roles import Layout

MAX_GPU = 1023  # what the engine takes

Dealt = dict[str, list[int]]
"""By role: the GPU of each process of this host, in the order of ranks. Empty: there are none."""


def deal(
    layout: Layout, named: Mapping[str, Sequence[int]], base: int | None, seen: int
) -> Dealt | None:
    """Gives each process of this host a GPU; None if there is none to give.

    Args:
        named: by role, GPUs that its processes take in turn.
        base: for a role without such a list, the GPU of the first process of each group; the others
            of the group take those that follow.
        seen: GPUs of this host. Without list and base, processes take those in turn that no list
            names, workers first, so no two share one where there are enough.
    """
    if not seen and not named and base is None:
        return None
    size = layout.group_size
    processes = [(role, i) for role, _ in layout.groups() for i in range(size)]
    taken = {gpu for gpus in named.values() for gpu in gpus}
    free = [gpu for gpu in range(seen) if gpu not in taken] or [*range(seen)]
    dealt: Dealt = {"worker": [], "server": []}
    turn = 0
    for role, place in processes:
        mine = dealt[role]
        if role in named:
            mine.append(named[role][len(mine) % len(named[role])])
        elif base is not None:
            mine.append(base + place)
        elif free:
            mine.append(free[turn % len(free)])
            turn += 1
        else:
            mine.append(place)
    return dealt


def told(dealt: Dealt) -> str:
    """The same in one line."""
    parts = [
        f"{role}{'s' * (len(gpus) > 1)} on GPU {','.join(map(str, gpus))}"
        for role, gpus in dealt.items()
        if gpus
    ]
    every = [gpu for gpus in dealt.values() for gpu in gpus]
    shared = sorted({gpu for gpu in every if every.count(gpu) > 1})
    if shared:
        parts.append(f"processes share GPU {','.join(map(str, shared))}")
    return "; ".join(parts)


def seen(environment: Mapping[str, str]) -> int:
    """GPUs that processes with this environment see: those of the NVIDIA driver, or of them those
    that CUDA_VISIBLE_DEVICES shows. 0 if STEPMESH_BACKEND is CPU."""
    backend = environment.get("STEPMESH_BACKEND") or environment.get("STEPMESH_BAKCEND") or ""
    if backend.strip().upper() == "CPU":
        return 0
    count = _installed()
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    if shown is None or count == 0:
        return count
    visible = 0
    for entry in shown.split(","):  # up to the first that is none, as CUDA reads it
        name = entry.strip()
        if not (name.startswith(("GPU-", "MIG-")) or name.isdecimal() and int(name) < count):
            break
        visible += 1
    return visible


def _installed() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return 0
        count = ctypes.c_uint()
        found = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one without these functions
        return 0
    return count.value if found else 0
