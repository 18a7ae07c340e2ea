"""torch.ops.fserver: channels of CPU tensors inside torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from channels import both, needs_compiler
from nodes import LIMIT, Cluster, in_thread

import fserver

# For inductor: one run of the C++ compiler instead of seven, which try what the processor has, and
# no processes that compile beside this one. They would import torch, each of them.
QUICK = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}


BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


def compiled(step: Callable[..., Any], backend: str, serve: Callable[[], None]) -> tuple[Any, Any]:
    """The compiled step, and the list of the threads that serve it. They begin when it is compiled:
    that may take longer than the server waits."""
    import torch._dynamo
    import torch._inductor.config

    served: list[Any] = []

    def compile(*graph: Any) -> Any:
        with torch._inductor.config.patch(QUICK):
            made = torch._dynamo.lookup_backend(backend)(*graph)
        served.append(in_thread(serve))
        return made

    torch._dynamo.reset()
    return torch.compile(step, backend=compile, fullgraph=True), served


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators(pair: Cluster, backend: str) -> None:
    x, y, z = torch.empty(8), torch.empty(8), torch.empty(8)
    w, s = both(pair, [x], [y], [z])

    def step(value: torch.Tensor) -> torch.Tensor:
        x.copy_(value * 2)
        torch.ops.fserver.send(w.number, w.outgoing, w.token)
        torch.ops.fserver.recv(w.number, w.incoming, w.token)
        return y + 1

    def serve() -> None:
        for _ in range(6):
            torch.ops.fserver.recv(s.number, s.incoming, s.token)
            z.copy_(s.tensors[0][0] + 3)
            torch.ops.fserver.send(s.number, s.outgoing, s.token)

    made, served = compiled(step, backend, serve)
    for i in range(3):
        assert made(torch.full((8,), float(10 + i))).tolist() == [2 * (10 + i) + 4] * 8
        assert step(torch.full((8,), float(i))).tolist() == [2 * i + 4] * 8
    [once] = served
    once.result(LIMIT)
    for call in (torch.ops.fserver.send, torch.ops.fserver.recv):
        with pytest.raises(fserver.ShapeError, match=r"tensor 0 is .*32 \[1\], but the channel"):
            call(w.number, [torch.ones(1)], w.token)
        text = r"tensor 0 is torch.int64 \[8\], but the channel's tensor is torch.float32 \[8\]"
        with pytest.raises(fserver.ShapeError, match=text):
            call(w.number, [torch.ones(8, dtype=torch.int64)], w.token)
    with pytest.raises(fserver.ShapeError, match="0 tensors given, but the channel has 1"):
        torch.ops.fserver.send(w.number, [], w.token)
    with pytest.raises(
        fserver.ShapeError, match=r"3 tensors given, but the channel has 2: pass \[\*"
    ):
        torch.ops.fserver.recv(w.number, [y, y, y], w.token)
    with pytest.raises(fserver.ClosedError, match="no open channel has number 999999"):
        torch.ops.fserver.recv(999999, [y], w.token)


@needs_compiler
def test_rows_in_a_compiled_function(pair: Cluster) -> None:
    """They are read after the message has come, if recv gets them too."""
    x, y, z = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    w, s = both(pair, [x], [y], [z])

    def step(value: torch.Tensor) -> torch.Tensor:
        x.copy_(value * 2)
        torch.ops.fserver.send(w.number, w.outgoing, w.token)
        torch.ops.fserver.recv(w.number, [*w.incoming, *w.rows], w.token)
        return value * 3 + w.rows[0]  # which could be computed in one loop with x

    def serve() -> None:
        for rows in (5, 3):
            s.recv()
            s.send([rows])

    made, served = compiled(step, "inductor", serve)
    assert [made(torch.ones(8))[0].item() for _ in range(2)] == [8, 6]
    [once] = served
    once.result(LIMIT)


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.long])],
)
def test_several_messages_in_one_function(pair: Cluster, backend: str) -> None:
    """With new tensors for each message, the next ones change none that was received before."""
    x, y, z = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    w, s = both(pair, [x], [y], [z])

    def exchange(value: torch.Tensor) -> list[torch.Tensor]:
        x.copy_(value)
        torch.ops.fserver.send(w.number, w.outgoing, w.token)
        into = [torch.empty_like(t) for t in (*w.incoming, *w.rows)]
        torch.ops.fserver.recv(w.number, into, w.token)
        return into

    def step(value: torch.Tensor) -> torch.Tensor:
        (a, rows), (b, fewer), (c, _) = (exchange(value + i) for i in range(3))
        return torch.stack([a * 2, b * 3, c * 5, rows - fewer + a])

    def serve() -> None:
        for i in range(9):
            s.recv()
            z.copy_(s.tensors[0][0] + 1)
            s.send([8 - i % 3])

    made, served = compiled(step, backend, serve)
    for i in range(3):
        found = made(torch.full((8,), float(10 * i)))[:, 0].tolist()
        assert found == [2 * (10 * i + 1), 3 * (10 * i + 2), 5 * (10 * i + 3), 10 * i + 2]
    [once] = served
    once.result(LIMIT)


def test_operators_are_what_they_say(pair: Cluster) -> None:
    """By what torch finds out about them."""
    import torch._dynamo  # which takes seconds; later the server waits

    x, y, z = torch.randn(8), torch.empty(8), torch.randn(8)

    def until_closed(call: Callable[[], None]) -> None:
        with contextlib.suppress(fserver.ClosedError):
            while True:
                call()

    w, s = both(pair, [x], [], name="there")
    served = in_thread(until_closed, s.recv)
    torch.library.opcheck(torch.ops.fserver.send.default, (w.number, w.outgoing, w.token))
    w.close()
    served.result(LIMIT)
    assert torch.equal(s.tensors[0][0], x)
    w, s = both(pair, [], [y], [z], name="back")
    served = in_thread(until_closed, s.send)
    torch.library.opcheck(torch.ops.fserver.recv.default, (w.number, w.incoming, w.token))
    w.close()
    served.result(LIMIT)
    assert torch.equal(y, z)
