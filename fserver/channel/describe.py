"""What the two sides of a channel tell each other of their tensors, and whether it fits."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ConfigError, Error, PeerLostError, ShapeError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
MOST_TENSORS = 256  # of one side, one way
MOST_DIMS = 64
MODES = ("kernel", "copy", "host")
OLD_MODES = {"sm": "kernel", "ce": "copy", "proxy": "host"}
NAMESPACES = {"pid": "PID", "ipc": "IPC", "mnt": "mount"}
"""What processes have to share, besides the host, for their GPUs to map each other's memory."""

DTYPES = (
    "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 bool "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
).split()


def name(given: Any) -> str:
    """A name of a channel, as far as it is text: what it may hold is for the node to say.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(given, str):
        raise ConfigError(
            f"channel: name is {given!r:.80}, want text of 1 to 64 bytes, the same on both sides, "
            "or None"
        )
    if "\0" in given or not given.isascii() and any("\ud800" <= c <= "\udfff" for c in given):
        raise ConfigError(f"channel: name is {given!r:.80}: give one of printable text")
    return given


def mode_named(given: Any) -> Any:
    """Returns a mode by its present name: the former names are taken too, and what is no mode is
    returned as it is."""
    return OLD_MODES.get(given, given) if isinstance(given, str) else given


def device(given: Any) -> Any:
    """A device that channels may be on, or None.

    Raises:
        ConfigError: it is none, or this process does not see it.
    """
    import torch

    try:
        device = None if given is None else torch.device(given)
    except (RuntimeError, TypeError, ValueError):
        device = torch.device("meta")
    if device is None:
        return None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f'channel: device is {given!r:.80}, want "cpu", "cuda" or None')
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= gpus:
        raise ConfigError(
            f"channel: device is {given!r:.80}, and torch sees {gpus} GPUs here: give "
            f'{"one of those, " if gpus else ""}"cpu" or None (see CUDA_VISIBLE_DEVICES)'
        )
    return device


def of_one_device(tensors: dict[str, Sequence[Tensor]], wanted: Any = None, gpu: Any = None) -> Any:
    """Returns the device of checked tensors, which are by the names of their arguments; if there
    are none, the one that is wanted, with its number.

    Args:
        gpu: the only GPU that they may be on; None: any.

    Raises:
        ConfigError: names the first two that differ, or one that is not where it may be or is
            wanted.
    """
    import torch

    named = [(f"{name}[{i}]", t.device) for name, row in tensors.items() for i, t in enumerate(row)]
    if gpu is not None:
        own = f"and this node's GPU is {gpu} (STEPMESH_GPU)"
        if wanted is not None and wanted not in (gpu, torch.device("cuda"), torch.device("cpu")):
            raise ConfigError(
                f'channel: device is {wanted}, {own}: give "cuda", or set STEPMESH_GPU='
                f"{wanted.index} for this process"
            )
        for name, place in named:
            if place.type == "cuda" and place != gpu:
                raise ConfigError(
                    f'channel: {name} is on {place}, {own}: pass {name}.to("{gpu}"), or set '
                    f"STEPMESH_GPU={place.index} for this process"
                )
    if not named:
        bare = wanted == torch.device("cuda")
        return gpu or torch.device("cuda", torch.cuda.current_device()) if bare else wanted
    first, device = named[0]
    for other, place in named:
        if place != device:
            raise ConfigError(
                f"channel: {first} is on {device} and {other} on {place}: give tensors of one "
                "device, or open a channel for each"
            )
    if wanted is not None and wanted not in (device, torch.device(device.type)):
        raise ConfigError(
            f"channel: device is {str(wanted)!r} and {first} is on {device}: leave device out, or "
            "give tensors that are there"
        )
    return device


def of(tensor: Tensor, key: int) -> list[Any]:
    """A tensor for the other side: key, dtype, shape."""
    return [key, str(tensor.dtype).partition(".")[2], list(tensor.shape)]


def all_of(tensors: Sequence[Tensor], keys: Sequence[int]) -> list[list[Any]]:
    """Several of them."""
    return [of(t, k) for t, k in zip(tensors, keys, strict=True)]


def text(
    mode: str, device: str, out: Sequence[list[Any]], into: Sequence[list[Any]], **more: Any
) -> str:
    """The description of one side for one peer. ``device`` names the host and kind of memory;
    two GPUs can reach each other only if it is equal."""
    return json.dumps(
        {"v": VERSION, "mode": mode, "device": device, "out": list(out), "in": list(into), **more}
    )


def read(peer: int, received: str) -> dict[str, Any]:
    """What a peer has told, checked.

    Raises:
        Error: it makes no sense, or is of another version.
    """
    try:
        theirs = json.loads(received)
        if theirs["v"] != VERSION:
            raise Error(
                f"channel: peer {peer} describes channels in version {theirs['v']!r:.20}, and this "
                f"is version {VERSION}: run the same fserver on both sides"
            )
        if theirs["mode"] not in MODES or not isinstance(theirs["device"], str):
            raise ValueError
        for way in ("out", "in"):
            if len(theirs[way]) > MOST_TENSORS:
                raise ValueError
            for key, dtype, shape in theirs[way]:
                if type(key) is not int or dtype not in DTYPES or len(shape) > MOST_DIMS:
                    raise ValueError
                if any(type(d) is not int or d < 0 for d in shape) or math.prod(shape) > 1 << 44:
                    raise ValueError
    except Error:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Error(
            f"channel: peer {peer} describes its side in a way that makes no sense"
        ) from error
    return theirs


def apart(worker: int, here: str, there: str) -> str:
    """Why the GPU of a worker and that of this server cannot reach each other, by the devices of
    their descriptions; empty if they may, or if neither is a GPU."""
    if here == there:
        return ""
    for side, place in ((f"worker {worker}", there), ("its server", here)):
        if place == "cpu":
            return f"the tensors of {side} are on the CPU"
    (host, *ours), (other, *theirs) = here.split(" "), there.split(" ")
    if host != other:
        return f"worker {worker} and its server are on different hosts"
    kinds = [n for k, n in NAMESPACES.items() if _named(ours, k) != _named(theirs, k)]
    return (
        f"worker {worker} and its server are in different {' and '.join(kinds) or 'other'} "
        "namespaces of one host (run both in one container)"
    )


def _named(namespaces: Sequence[str], kind: str) -> list[str]:
    return [text for text in namespaces if text.startswith(f"{kind}:")]


def reason(theirs: dict[str, Any]) -> str:
    """What a server says of why its path is not the mode; see apart."""
    return str(theirs.get("reason", ""))[:400]


def refusal(mode: str, error: BaseException) -> str:
    """In place of a description: why there is none."""
    return text(mode, "", [], [], refused=str(error)[:400], kind=type(error).__name__)


def lasting(mode: str, error: BaseException) -> str:
    """What a worker that refuses leaves behind for servers that open their sides later. Nothing, if
    they would do better to wait for its next try."""
    passing = (TimeoutError, PeerLostError, ClosedError)
    stays = isinstance(error, Exception) and not isinstance(error, passing)
    return refusal(mode, error) if stays else ""


def refused(who: str, theirs: dict[str, Any]) -> Error:
    """The error of a peer that has told a refusal, of the same kind where that is about what the
    caller can change."""
    kinds: dict[str, type[Error]] = {kind.__name__: kind for kind in (ConfigError, ShapeError)}
    kind = kinds.get(str(theirs.get("kind")), Error)
    return kind(f"channel: {who} refuses: {str(theirs['refused']):.400}")


def _show(tensor: Sequence[Any]) -> str:
    key, dtype, shape = tensor
    return f"key {key}, {dtype} {shape}"


def match(
    peer: int, what: str, ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]
) -> None:
    """Checks that the tensors of one way are the same on both sides.

    Raises:
        ShapeError: names the first that differs.
    """
    if len(ours) != len(theirs):
        raise ShapeError(
            f"channel: {len(ours)} {what} tensors here and {len(theirs)} at peer {peer}: give the "
            "same keys on both sides"
        )
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            raise ShapeError(
                f"channel: {what} tensor {i} is {_show(a)} here, and {_show(b)} at peer {peer}: "
                "keys, dtypes and shapes must be equal"
            )


def has_memory(tensor: Tensor) -> bool:
    """Whether all of a strided tensor is there; not of one that is fake, or resized to nothing."""
    try:
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        return not tensor.numel() or (
            tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end
        )
    except RuntimeError:
        return False


def listed(name: str, given: Any, what: str) -> list[Any]:
    """An argument that is to be a list.

    Raises:
        ConfigError: it is none.
    """
    import torch

    if isinstance(given, torch.Tensor):
        raise ConfigError(f"channel: {name} is a tensor, want a list of {what}: pass [{name}]")
    try:
        return list(given)
    except TypeError:
        raise ConfigError(
            f"channel: {name} is {given!r:.80}, want a list of {what}: pass [] for none"
        ) from None


def divided(
    pull: list[Tensor], keys: list[int], peers: int, who: str
) -> tuple[list[list[Tensor]], list[list[int]]]:
    """The pull tensors of each peer, a server or a worker, and their keys, which may be given once
    for all.

    Raises:
        ShapeError: their number does not divide.
    """
    if len(pull) % peers:
        raise ShapeError(
            f"channel: {len(pull)} pull tensors, which {peers} {who}s do not divide: give "
            f"pull[i*Q + j], tensor j of Q {'from' if who == 'server' else 'for'} {who} i"
        )
    each = len(pull) // peers
    if len(keys) not in (len(pull), each):
        raise ShapeError(
            f"channel: {len(keys)} pull_keys for {len(pull)} pull tensors of {peers} {who}s: give "
            f"{len(pull)} or {each}"
        )
    keys = keys if len(keys) == len(pull) else keys * peers
    parts = [slice(i * each, (i + 1) * each) for i in range(peers)]
    return [pull[part] for part in parts], [keys[part] for part in parts]


def _apart(call: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses memory that is written twice."""
    spans = sorted((t.data_ptr(), t.nbytes, i) for i, t in enumerate(tensors) if t.nbytes)
    for (begin, size, i), (other, _, j) in itertools.pairwise(spans):
        if begin + size > other:
            a, b = sorted((i, j))
            raise ConfigError(
                f"{call}: {name}[{a}] and {name}[{b}] share memory, and both would be written: "
                "give each a tensor of its own"
            )


def check(call: str, name: str, tensors: Sequence[Any], keys: Sequence[int], written: bool) -> None:
    """Checks tensors that are handed to a channel.

    Raises:
        ConfigError: a tensor is not one that can be sent or written; a key is no key.
        ShapeError: one is not contiguous, or there are too many.
    """
    import torch

    if len(tensors) > MOST_TENSORS:
        raise ShapeError(f"{call}: {len(tensors)} {name} tensors: at most {MOST_TENSORS}")
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise ConfigError(f"{call}: {name}[{i}] is of type {type(t).__name__}, want a tensor")
        if t.layout != torch.strided or t.is_quantized or t.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"{call}: {name}[{i}] is on {t.device} with layout {t.layout}: want a plain CPU or "
                "CUDA tensor"
            )
        if not has_memory(t):
            raise ConfigError(
                f"{call}: {name}[{i}] of shape {list(t.shape)} has no memory (it was freed by "
                "untyped_storage().resize_, or is a fake tensor): pass one that keeps its memory "
                "while the channel is open"
            )
        if not t.is_contiguous() or t.is_conj() or t.is_neg():
            raise ShapeError(
                f"{call}: {name}[{i}] of shape {list(t.shape)} and strides {list(t.stride())} is "
                "not contiguous: use .contiguous()"
            )
        if str(t.dtype).partition(".")[2] not in DTYPES:
            raise ConfigError(f"{call}: {name}[{i}] is of {t.dtype}, which channels do not carry")
        if written and t.requires_grad and t.is_leaf and torch.is_grad_enabled():
            raise ConfigError(
                f"{call}: {name}[{i}] is a leaf that requires grad, and would be written in place: "
                "pass .detach()"
            )
    for i, key in enumerate(keys):
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 1 << 64:
            raise ConfigError(f"{call}: key {i} of {name} is {key!r}, want an int of 0 to 2**64-1")
    if written:
        _apart(call, name, tensors)
