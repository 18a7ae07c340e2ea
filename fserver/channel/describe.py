"""The descriptions of their tensors that the two sides of a channel send each other, and the checks
whether they match."""

from __future__ import annotations

import itertools
import json
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fserver.errors import ClosedError, ConfigError, Error, PeerLostError, ShapeError, TimeoutError

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
MOST_TENSORS = 256  # of one side, one way
MOST_DIMS = 64
LANDING = 1 << 62  # the least of the keys of landing()
MODES = ("kernel", "copy", "host")
OLD_MODES = {"sm": "kernel", "ce": "copy", "proxy": "host"}
NAMESPACES = {"pid": "PID", "ipc": "IPC", "mnt": "mount"}
"""The namespaces that processes of one host have to share so that their GPUs can map each other's
memory."""

DTYPES = (
    "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 bool "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
).split()


def name(given: Any) -> str:
    """Returns the name of a channel after checking that it is text. The node checks the rest.

    Raises:
        ConfigError: it is not text.
    """
    if not isinstance(given, str):
        raise ConfigError(
            f"channel: name is {given!r:.80}, want text of 1 to 64 bytes, the same on both sides, "
            "or None"
        )
    if "\0" in given or not given.isascii() and any("\ud800" <= c <= "\udfff" for c in given):
        raise ConfigError(f"channel: name is {given!r:.80}: give a name of printable text")
    return given


def mode_named(given: Any) -> Any:
    """Returns the present name of a mode that is given by its present or its former name. Returns
    any other value unchanged."""
    return OLD_MODES.get(given, given) if isinstance(given, str) else given


def device(given: Any) -> Any:
    """Returns the torch device for a ``device`` argument, or None for None.

    Raises:
        ConfigError: it is not a CPU or CUDA device, or this process does not see it.
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
            f"channel: device is {given!r:.80}, but torch sees {gpus} GPUs here: give "
            f'{"one of those, " if gpus else ""}"cpu" or None (see CUDA_VISIBLE_DEVICES)'
        )
    return device


def of_one_device(tensors: dict[str, Sequence[Tensor]], wanted: Any = None, gpu: Any = None) -> Any:
    """Returns the one device of checked tensors, or, without tensors, the wanted device with its
    number.

    Args:
        tensors: the tensors, by the name of their argument.
        wanted: the device that the caller wants. None accepts any.
        gpu: the only GPU that the tensors may be on. None accepts any.

    Raises:
        ConfigError: two tensors are on different devices, or a tensor is not on the wanted device
            or is on another GPU than ``gpu``.
    """
    import torch

    named = [(f"{name}[{i}]", t.device) for name, row in tensors.items() for i, t in enumerate(row)]
    if gpu is not None:
        own = f"but this node's GPU is {gpu} (STEPMESH_GPU)"
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
                f"channel: {first} is on {device} and {other} is on {place}: give tensors of one "
                "device, or open a channel for each device"
            )
    if wanted is not None and wanted not in (device, torch.device(device.type)):
        raise ConfigError(
            f"channel: device is {str(wanted)!r} and {first} is on {device}: leave device out, or "
            f"give tensors on {wanted}"
        )
    return device


def of(tensor: Tensor, key: int) -> list[Any]:
    """Describes a tensor for the other side: key, dtype, shape."""
    return [key, str(tensor.dtype).partition(".")[2], list(tensor.shape)]


def all_of(tensors: Sequence[Tensor], keys: Sequence[int]) -> list[list[Any]]:
    """Describes several tensors."""
    return [of(t, k) for t, k in zip(tensors, keys, strict=True)]


def text(
    mode: str, device: str, out: Sequence[list[Any]], into: Sequence[list[Any]], **more: Any
) -> str:
    """Returns the description of one side for one peer. ``device`` names the host and the kind of
    memory. Two GPUs can reach each other only if it is equal on both sides."""
    return json.dumps(
        {"v": VERSION, "mode": mode, "device": device, "out": list(out), "in": list(into), **more}
    )


def read(peer: int, received: str) -> dict[str, Any]:
    """Returns the description that a peer has sent, after checking it.

    Raises:
        Error: it is malformed, or has another version.
    """
    try:
        theirs: dict[str, Any] = json.loads(received)
        if theirs["v"] != VERSION:
            raise Error(
                f"channel: peer {peer} describes channels in format {theirs['v']!r:.20}, but this "
                f"side uses format {VERSION}: run the same version of fserver on both sides"
            )
        if theirs["mode"] not in MODES or not isinstance(theirs["device"], str):
            raise ValueError
        lands = theirs.get("lands", 0)
        if type(lands) not in (int, bool) or lands not in (0, 1) and not LANDING <= lands < 1 << 63:
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
            f"channel: peer {peer} describes its side in a malformed message: run the same version "
            "of fserver on both sides"
        ) from error
    return theirs


def landing() -> int:
    """Returns the first of the keys by which the pushes of one channel land in the tensors of the
    servers. They are random, because no other push may have one of them."""
    return LANDING + secrets.randbits(48) * MOST_TENSORS


def landing_keys(first: int, n: int) -> list[int]:
    """Returns the keys of n tensors."""
    return [first + j for j in range(n)]


def apart(worker: int, here: str, there: str) -> str:
    """Returns why the GPUs of a worker and of this server cannot reach each other, judged by the
    devices of their descriptions. Empty if they may reach each other, or if neither is a GPU."""
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
    """Returns why a server uses a path other than the mode; see apart."""
    return str(theirs.get("reason", ""))[:400]


def refusal(mode: str, error: BaseException) -> str:
    """Returns the text that is sent instead of a description, with the reason why there is none."""
    return text(mode, "", [], [], refused=str(error)[:400], kind=type(error).__name__)


def lasting(mode: str, error: BaseException) -> str:
    """Returns the refusal that a worker leaves for servers that open their sides later. Empty if
    these servers should wait for the worker's next try instead."""
    passing = (TimeoutError, PeerLostError, ClosedError)
    stays = isinstance(error, Exception) and not isinstance(error, passing)
    return refusal(mode, error) if stays else ""


def refused(who: str, theirs: dict[str, Any]) -> Error:
    """Returns the error for a refusal that a peer has sent. A ConfigError or ShapeError of the peer
    keeps its type, because the caller can correct the cause."""
    kinds: dict[str, type[Error]] = {kind.__name__: kind for kind in (ConfigError, ShapeError)}
    kind = kinds.get(str(theirs.get("kind")), Error)
    return kind(f"channel: {who} refuses: {str(theirs['refused']):.400}")


def _show(tensor: Sequence[Any]) -> str:
    key, dtype, shape = tensor
    return f"key {key}, {dtype} {shape}"


def match(
    peer: int, what: str, ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]
) -> None:
    """Checks that the tensors of one direction match on both sides.

    Raises:
        ShapeError: names the first tensor that differs.
    """
    if len(ours) != len(theirs):
        raise ShapeError(
            f"channel: {len(ours)} {what} tensors here, but {len(theirs)} at peer {peer}: give the "
            "same keys on both sides"
        )
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            raise ShapeError(
                f"channel: {what} tensor {i} is {_show(a)} here, but {_show(b)} at peer {peer}: "
                "give equal keys, dtypes and shapes on both sides"
            )


def has_memory(tensor: Tensor) -> bool:
    """Reports whether a strided tensor has its memory. A fake tensor, or one whose storage was
    resized to nothing, has none."""
    try:
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        return not tensor.numel() or (
            tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end
        )
    except RuntimeError:
        return False


def listed(name: str, given: Any, what: str) -> list[Any]:
    """Returns an argument as a list.

    Raises:
        ConfigError: it is not a sequence.
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
    """Returns the pull tensors and keys of each peer, a server or a worker. One list of keys may
    serve for all peers.

    Raises:
        ShapeError: the number of tensors or of keys does not fit the number of peers.
    """
    if len(pull) % peers:
        raise ShapeError(
            f"channel: {len(pull)} pull tensors cannot be divided among {peers} {who}s: give Q "
            f"tensors for each {who}, where pull[i*Q + j] is tensor j "
            f"{'from' if who == 'server' else 'for'} {who} i"
        )
    each = len(pull) // peers
    if len(keys) not in (len(pull), each):
        raise ShapeError(
            f"channel: {len(keys)} pull_keys for {len(pull)} pull tensors and {peers} {who}s: give "
            f"{len(pull)} or {each} keys"
        )
    keys = keys if len(keys) == len(pull) else keys * peers
    parts = [slice(i * each, (i + 1) * each) for i in range(peers)]
    return [pull[part] for part in parts], [keys[part] for part in parts]


def _apart(call: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Refuses tensors that share memory, because both would be written."""
    spans = sorted((t.data_ptr(), t.nbytes, i) for i, t in enumerate(tensors) if t.nbytes)
    for (begin, size, i), (other, _, j) in itertools.pairwise(spans):
        if begin + size > other:
            a, b = sorted((i, j))
            raise ConfigError(
                f"{call}: {name}[{a}] and {name}[{b}] share memory, and both would be written: "
                "give two tensors that do not overlap"
            )


def check(call: str, name: str, tensors: Sequence[Any], keys: Sequence[int], written: bool) -> None:
    """Checks the tensors and keys of one argument.

    Raises:
        ConfigError: a tensor cannot be sent or written, or a key is not valid.
        ShapeError: a tensor is not contiguous, or there are too many.
    """
    import torch

    if len(tensors) > MOST_TENSORS:
        raise ShapeError(
            f"{call}: {len(tensors)} {name} tensors: give at most {MOST_TENSORS}, or open more "
            "channels"
        )
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise ConfigError(
                f"{call}: {name}[{i}] is of type {type(t).__name__}, want a torch.Tensor"
            )
        if t.layout != torch.strided or t.is_quantized or t.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"{call}: {name}[{i}] is on {t.device} with layout {t.layout}"
                f"{' and quantized' if t.is_quantized else ''}: want a dense CPU or CUDA tensor"
            )
        if not has_memory(t):
            raise ConfigError(
                f"{call}: {name}[{i}] of shape {list(t.shape)} has no memory (it was freed by "
                "untyped_storage().resize_, or is a fake tensor): pass a tensor that keeps its "
                "memory while the channel is open"
            )
        if not t.is_contiguous() or t.is_conj() or t.is_neg():
            raise ShapeError(
                f"{call}: {name}[{i}] of shape {list(t.shape)} and strides {list(t.stride())} is "
                "not contiguous: use .contiguous()"
            )
        if str(t.dtype).partition(".")[2] not in DTYPES:
            raise ConfigError(
                f"{call}: {name}[{i}] has dtype {t.dtype}, which channels cannot send: pass "
                f"{name}[{i}].view(torch.uint8) or another dtype"
            )
        if written and t.requires_grad and t.is_leaf and torch.is_grad_enabled():
            raise ConfigError(
                f"{call}: {name}[{i}] is a leaf that requires grad, but the channel would write to "
                f"it in place: pass {name}[{i}].detach()"
            )
    for i, key in enumerate(keys):
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 1 << 64:
            raise ConfigError(
                f"{call}: key {i} of {name} is {key!r:.80}, want an int from 0 to 2**64-1"
            )
    if written:
        _apart(call, name, tensors)
