"""Nodes in processes of their own: the drop-in, lost peers, signals, fork and exit."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forks
from nodes import LIMIT, Child, Cluster, Parent, eventually, in_thread, together

import fserver
import fserver_lib

MakeChild = Callable[..., Child]
MakeCluster = Callable[..., Cluster]


def environment_of(role: str, port: int, workers: int = 1, servers: int = 1, **more: Any) -> Any:
    return {
        "DMLC_ROLE": role,
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "FSERVER_INIT_TIMEOUT": str(LIMIT),
        "FSERVER_LOG": "error",
        **{name: str(value) for name, value in more.items()},
    }


# The drop-in


def drop_in_scheduler(parent: Parent) -> None:
    fserver_lib.init()
    fserver_lib.stop()
    parent.put("stopped")


def drop_in_worker(parent: Parent) -> None:
    f = fserver_lib
    f.init()
    rank = int(os.environ["DMLC_NODE_RANK"])
    for i in range(20):
        x = torch.full((8, 4), float(10 * rank + i))
        y = [torch.empty(8, 4), torch.empty(8, 4)]
        h = f.push_pull([x], [0], y, [0], need_event=True)
        assert h == 2 * i  # as in StepMesh: of one push, and of one answer of each server
        assert f.get_all_handlers(h) == [h, h + 1]
        f.wait(h)
        assert all(bool((y[s] == x * (s + 2)).all()) for s in range(2))
        stamps = f.fetch_trace(h)
        assert sorted(stamps[:2] + stamps[6:]) == stamps[:2] + stamps[6:]
        assert 0 <= f.get_nanosecond() - stamps[7] < 60e9
    f.barrier(include_server=True, include_client=True)
    f.barrier(False, True, instance_barrier=False)
    parent.put("done")
    f.finalize()
    f.finalize()
    f.stop()
    with pytest.raises(fserver.ClosedError, match=r"push_pull: there is no node: call init\(\)"):
        f.push_pull([x], [0], [], [])
    parent.put("stopped")


def drop_in_server(parent: Parent) -> None:
    f = fserver  # the same functions
    rank = int(os.environ["DMLC_NODE_RANK"])
    buffer = torch.zeros(2, 32)
    f.init()
    assert f.push_pull is fserver_lib.push_pull and f.get_batch is fserver_lib.get_batch
    with pytest.raises(fserver.ConfigError, match="push_pull: this process is a server"):
        f.push_pull([buffer], [0], [], [])
    with pytest.raises(fserver.Error, match="init: the node is open already"):
        f.init()
    f.register_recv_buffer(buffer, [0, 1], [100, 100])
    for i in range(20):
        batch = f.get_batch()
        assert [keys for _, _, keys in batch] == [[0], [0]]
        handlers = [handler for handler, _, _ in batch]
        assert [f.worker_of(handler) for handler in handlers] == [0, 1]
        vec = [tensors for _, tensors, _ in batch]
        if i % 2:
            f.respond_vec(torch.cat([t[0] for t in vec]) * (rank + 2), vec, handlers)
        else:
            for handler, [x] in zip(handlers, vec, strict=True):
                f.respond([x * (rank + 2)], handler, need_event=False)
    f.barrier(True, True)
    parent.put("done")
    with pytest.raises(fserver.ClosedError):
        f.get_batch()
    f.stop()
    parent.put("stopped")


def test_drop_in(child: MakeChild, port: int) -> None:
    """Two workers, two servers and a scheduler, as StepMesh's users start them."""
    children = []
    for role, function, ranks in (
        ("worker", drop_in_worker, 2),
        ("server", drop_in_server, 2),
        ("scheduler", drop_in_scheduler, 1),
    ):
        for rank in range(ranks):
            env = environment_of(role, port, workers=2, servers=2, DMLC_NODE_RANK=rank)
            children.append(child(function, **env))
    for c in children[:4]:
        assert c.get() == "done"
    for c in children:
        assert c.get() == "stopped"
        c.end()


def init_again(parent: Parent) -> None:
    f = fserver_lib
    handlers = []
    for _ in range(2):
        f.init()
        handlers.append(f.push_pull([torch.ones(1)], [0], [torch.empty(1)], [0]))
        f.wait(handlers[-1])
        f.stop()
    parent.put(handlers)


def test_init_after_stop(child: MakeChild, port: int) -> None:
    """A second life of the process; handlers go on being counted."""
    worker = child(init_again, **environment_of("worker", port))
    for _ in range(2):
        with fserver.Server(scheduler=f"127.0.0.1:{port}", host_scheduler=True) as server:
            [(handler, tensors, _)] = server.get_batch()
            server.respond(tensors, handler)
    assert worker.get() == [0, 2]


def test_before_init() -> None:
    for call in (
        lambda: fserver_lib.push_pull([], [], [], []),
        lambda: fserver_lib.wait(0),
        lambda: fserver_lib.get_batch(),
        lambda: fserver.fail(0, "no"),
        lambda: fserver.barrier(True, True),
    ):
        with pytest.raises(fserver.ClosedError, match=r"there is no node: call init\(\) first"):
            call()
    fserver_lib.stop()
    fserver.finalize()


def test_wrong_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_ROLE", "boss")
    with pytest.raises(fserver.ConfigError, match="DMLC_ROLE='boss': want worker, server"):
        fserver.init()


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("write_flag", 2, r"flag is Float of shape \[1\] on cpu: want one int64"),
        ("wait_flag", 2, r"flag is Float of shape \[1\] on cpu: want one int64"),
        ("seq_add_one", 1, r"seq is Float of shape \[1\] on cpu: want one int64"),
    ],
)
def test_calls_for_gpus_say_what_is_wrong(name: str, arguments: int, says: str) -> None:
    for module in (fserver, fserver_lib):
        with pytest.raises(fserver.Error, match=f"{name}: .*({says})"):
            getattr(module, name)(*[torch.zeros(1)] * arguments)


JOINT = """
import os
import torch
import fserver_lib as f

f.init()
role = os.environ["DMLC_ROLE"]
if role == "worker":
    y = torch.empty(2)
    f.wait(f.push_pull([torch.ones(2)], [0], [y], [0]))
    assert y.tolist() == [2, 2]
elif role == "server":
    batch = f.get_batch()
    for handler, [x], _ in batch:
        f.respond([x + 1], handler)
print(role, "is done", flush=True)
f.stop()
"""


def test_joint(tmp_path: Any) -> None:
    script = tmp_path / "joint.py"
    script.write_text(JOINT)
    # An empty value is as good as none.
    done = run_python([str(script)], DMLC_ROLE=" Joint ", DMLC_NUM_WORKER="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("worker is done") == 1
    assert done.stdout.count("server is done") == 1


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("DMLC_NUM_WORKER=two", 'DMLC_NUM_WORKER="two": want a whole number from 1 to 65535'),
        ("DMLC_NUM_SERVER=-3", 'DMLC_NUM_SERVER="-3": want a whole number from 1 to 65535'),
        ("DMLC_GROUP_SIZE=0", 'DMLC_GROUP_SIZE="0": want a whole number from 1 to 1024'),
        ("FSERVER_LOG=loud", 'FSERVER_LOG="loud": want error, warn, info or debug'),
        ("DMLC_ROLE=boss", "DMLC_ROLE='boss': want worker, server, scheduler or joint"),
    ],
)
def test_joint_with_a_wrong_setting(programs: Forks, setting: str, text: str) -> None:
    name, value = setting.split("=")
    script = "import fserver_lib; fserver_lib.init()"
    done = programs.run("-c", script, limit=120, **{"DMLC_ROLE": "joint", name: value})
    assert done.returncode == 1
    assert text in done.stderr and "ConfigError" in done.stderr
    assert "usage:" not in done.stderr


# Import


def run_python(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=10 * LIMIT,  # the first import of torch can take minutes
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import fserver_lib as f",
        "import fserver as f",
        "from fserver import fserver_lib as f",
        "import fserver_lib, fserver; f = fserver_lib",
        "import torch; import fserver_lib as f",
        "import fserver_lib as f; import torch",
    ],
)
def test_import_loads_no_engine(imports: str) -> None:
    program = f"""
        {imports}
        import sys
        from fserver import fserver_lib
        assert f.push_pull is fserver_lib.push_pull
        for name in fserver_lib.__all__:
            assert hasattr(f, name), name
        assert "fserver._C" not in sys.modules
        assert "/_C." not in open("/proc/self/maps").read().replace("/torch/", "")
        assert "torch" in sys.modules or "import torch" not in {imports!r}
    """
    done = run_python(["-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


# A peer that dies


def member(parent: Parent, role: str, scheduler: str, options: dict[str, Any], call: str) -> None:
    """Opens a node, says so, and makes the call, until it is killed."""
    node = getattr(fserver, role)(scheduler=scheduler, connect=False, **options)
    parent.put(node.address)
    node.connect()
    parent.put("connected")
    if call == "barrier":
        node.barrier(True, True)
    threading.Event().wait()


KNOWN = 5.0  # seconds: a busy host can stop everybody for some
OPTIONS = {"settings": {"FSERVER_LOG": "error"}, "init_timeout": LIMIT}


def lost(future: Any, killed: float, role: str) -> None:
    """The call reports the loss as soon as the connection ends, long before heartbeats time out."""
    with pytest.raises(fserver.PeerLostError) as raised:
        future.result(LIMIT)
    assert time.monotonic() - killed < KNOWN
    assert (raised.value.role, raised.value.rank) == (role, 0)
    assert raised.value.reason
    assert f"{role} " in str(raised.value)


@pytest.mark.parametrize("call", ["wait", "barrier", "stop"])
def test_a_worker_is_told_of_a_killed_server(child: MakeChild, call: str) -> None:
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, **OPTIONS)
    other = child(member, "Server", scheduler.scheduler, OPTIONS, "")
    worker = fserver.Worker(scheduler=scheduler.scheduler, **OPTIONS)
    scheduler.connect()
    other.get()
    assert other.get() == "connected"
    h = worker.push_pull([torch.ones(1)], [0], [torch.empty(1)], [0])
    # Or it may hear that its worker leaves, after which its end is no loss.
    other.freeze()
    future = in_thread(
        {
            "wait": lambda: worker.wait(h, LIMIT * 1e3),
            "barrier": lambda: worker.barrier(True, True),
            "stop": worker.stop,
        }[call]
    )
    killed = other.kill()
    lost(future, killed, "server")
    if call == "wait":
        for handler in (h, worker.push_pull([torch.ones(1)], [0], [], [])):
            with pytest.raises(fserver.PeerLostError):
                worker.wait(handler)
    worker.close()
    scheduler.close()


@pytest.mark.parametrize("call", ["get_batch", "barrier", "stop"])
def test_a_server_is_told_of_a_killed_worker(child: MakeChild, call: str) -> None:
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False, **OPTIONS)
    other = child(member, "Worker", server.scheduler, OPTIONS, "")
    server.connect()
    other.get()
    assert other.get() == "connected"
    future = in_thread(
        {
            "get_batch": server.get_batch,
            "barrier": lambda: server.barrier(True, True),
            "stop": server.stop,
        }[call]
    )
    killed = other.kill()
    lost(future, killed, "worker")
    server.close()


def test_init_ends_when_a_member_is_killed(
    child: MakeChild, capfd: pytest.CaptureFixture[str]
) -> None:
    server = fserver.Server(
        scheduler="127.0.0.1:0",
        host_scheduler=True,
        connect=False,
        workers=2,
        **{**OPTIONS, "settings": {"FSERVER_LOG": "info"}},
    )
    other = child(member, "Worker", server.scheduler, {**OPTIONS, "workers": 2}, "")
    other.get()
    future = in_thread(server.connect)
    # It is a member when the scheduler knows it; only then can it be lost.
    eventually(lambda: re.search("worker 0 .* has registered", capfd.readouterr().err) is not None)
    lost(future, other.kill(), "worker")
    assert server.closed


def scheduler_alone(parent: Parent, log: str) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    options = {**OPTIONS, "settings": {"FSERVER_LOG": "info"}}
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", connect=False, **options)
    parent.put(scheduler.scheduler)
    scheduler.connect()
    threading.Event().wait()


@pytest.mark.parametrize("call", ["init", "barrier", "stop"])
def test_all_are_told_of_a_killed_scheduler(child: MakeChild, tmp_path: Path, call: str) -> None:
    log = tmp_path / "log"
    other = child(scheduler_alone, str(log))
    address = other.get()
    server = fserver.Server(scheduler=address, connect=False, **OPTIONS)
    if call == "init":
        future = in_thread(server.connect)
        eventually(lambda: "server 0 " in log.read_text().rpartition("has registered")[0])
    else:
        worker = fserver.Worker(scheduler=address, connect=False, **OPTIONS)
        together([server.connect, worker.connect])
        future = in_thread(server.stop if call == "stop" else lambda: server.barrier(True, True))
    lost(future, other.kill(), "scheduler")
    if call != "init":
        worker.close()
    server.close()


def test_the_others_go_on_without_a_killed_worker(child: MakeChild, cluster: MakeCluster) -> None:
    """A lost node of one cluster is nothing to another cluster in the same process."""
    bystander = cluster()
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False, **OPTIONS)
    other = child(member, "Worker", server.scheduler, OPTIONS, "")
    server.connect()
    lost(in_thread(server.get_batch), other.kill(), "worker")
    h = bystander.worker.push_pull([torch.ones(1)], [0], [], [])
    bystander.server.respond([], bystander.server.get_batch()[0][0])
    bystander.worker.wait(h)
    server.close()


# Ctrl-C


def interrupted(parent: Parent, call: str) -> None:
    """Makes a call that blocks, and sends when KeyboardInterrupt came out of it."""
    if call == "init":
        server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False)
        blocking = server.connect
    else:
        server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False)
        worker = fserver.Worker(scheduler=server.scheduler, connect=False)
        together([server.connect, worker.connect])
        h = worker.push_pull([torch.ones(1)], [0], [torch.empty(1)], [0])
        server.get_batch()
        blocking = {
            "wait": lambda: worker.wait(h, LIMIT * 1e3),
            "get_batch": server.get_batch,
            "barrier": lambda: worker.barrier(True, True),
            "stop": worker.stop,
        }[call]
    try:
        parent.put("now")
        blocking()
    except KeyboardInterrupt:
        parent.put(time.monotonic())


@pytest.mark.parametrize("call", ["init", "wait", "get_batch", "barrier", "stop"])
def test_ctrl_c(child: MakeChild, call: str) -> None:
    other = child(interrupted, call, FSERVER_LOG="error")
    assert other.get() == "now"
    time.sleep(0.3)  # until the call blocks, of which there is no sign
    sent = time.monotonic()
    os.kill(other.pid, signal.SIGINT)
    assert other.get() - sent < 5  # the call itself blocks for LIMIT, or for ever
    other.end()


# Fork


def forks(parent: Parent) -> None:
    cluster = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False)
    worker = fserver.Worker(scheduler=cluster.scheduler, connect=False)
    together([cluster.connect, worker.connect])
    h = worker.push_pull([torch.ones(8)], [0], [torch.empty(8)], [0])
    [(handler, tensors, _)] = cluster.get_batch()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = []
        for call in (
            lambda: worker.push_pull([torch.ones(1)], [0], [], []),
            lambda: worker.wait(h),
            lambda: cluster.get_batch(),
            lambda: worker.barrier(True, True),
            lambda: worker.stop(),
            lambda: fserver.Worker(scheduler="127.0.0.1:1"),
            lambda: fserver_lib.init(),
        ):
            try:
                call()
                report.append("nothing was raised")
            except fserver.Error as error:
                report.append(str(error))
        if not h.done():
            report.append("wait() would raise at once, and done() is False")
        worker.close()
        del worker, cluster, tensors, call
        gc.collect()  # nodes and receive buffers that the parent has
        os.write(send, "\n".join(report).encode())
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(send)
    text = b""
    while part := os.read(receive, 65536):
        text += part
    status = os.waitpid(pid, 0)[1]
    cluster.respond([t + 1 for t in tensors], handler)  # the parent goes on
    worker.wait(h)
    parent.put((status, text.decode().splitlines()))


def test_use_after_fork_raises_at_once(child: MakeChild) -> None:
    started = time.monotonic()
    status, report = child(forks, FSERVER_LOG="error").get()
    assert status == 0
    assert len(report) == 7
    for line in report:
        assert "the engine was started before this process was forked" in line
    assert time.monotonic() - started < 15


def forks_beside_a_scheduler(parent: Parent) -> None:
    """The engine runs here, and torch is not connected to it."""
    scheduler = fserver.Scheduler(scheduler="127.0.0.1:0", workers=1, servers=1, connect=False)
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fserver.Worker(scheduler=scheduler.scheduler)
        except fserver.Error as error:
            os.write(send, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    scheduler.close()
    parent.put(os.read(receive, 1000).decode())


def test_fork_beside_a_scheduler(child: MakeChild) -> None:
    said = child(forks_beside_a_scheduler, FSERVER_LOG="error").get()
    assert said.startswith("load: the engine was started before this process was forked")


def forks_first(parent: Parent) -> None:
    """Both sides of a fork open a node."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        worker = fserver.Worker(scheduler=os.read(receive, 100).decode())
        y = torch.empty(3)
        worker.wait(worker.push_pull([torch.ones(3)], [0], [y], [0]))
        worker.stop()
        os._exit(0 if y.tolist() == [2, 2, 2] else 1)
    server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False)
    os.write(send, server.scheduler.encode())
    with server:
        server.connect()
        [(handler, [x], _)] = server.get_batch()
        server.respond([x + 1], handler)
    parent.put(os.waitpid(pid, 0)[1])


def test_import_fork_init(child: MakeChild) -> None:
    assert child(forks_first, FSERVER_LOG="error").get() == 0


# Exit


EXIT = """
import threading
import time
import torch
import fserver

server = fserver.Server(scheduler="127.0.0.1:0", host_scheduler=True, connect=False)
worker = fserver.Worker(scheduler=server.scheduler, connect=False)
other = threading.Thread(target=worker.connect)
other.start()
server.connect()
other.join()

x = torch.ones(1 << 20)
h = worker.push_pull([x], [0], [torch.empty(1)], [0])
[(handler, tensors, keys)] = server.get_batch()
blocked = []

def stubborn(call):
    while True:
        try:
            blocked.append(1)
            call()
        except Exception:
            pass

for call in (
    server.get_batch,
    lambda: worker.wait(h, 1e6),
    lambda: worker.barrier(True, True),
    lambda: worker.push_pull([x], [1], [], []),
):
    threading.Thread(target=stubborn, args=(call,), daemon=True).start()
while len(blocked) < 4:
    time.sleep(0.01)
time.sleep(0.2)
how = {how!r}
print(time.monotonic())
if how == "error":
    raise KeyError("on purpose")
"""


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("error", 1)])
def test_exit_with_everything_open(how: str, status: int) -> None:
    program = EXIT.replace("{how!r}", repr(how))
    done = run_python(["-c", program], FSERVER_LOG="error")
    assert done.returncode == status, done.stderr
    assert done.stderr == "" or (how == "error" and "on purpose" in done.stderr)
    assert time.monotonic() - float(done.stdout) < LIMIT


def wakes() -> dict[str, int]:
    """How often each thread of this process has gone to sleep."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/status") as file:
            found[thread] = int(file.read().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found


def exchanging_worker(parent: Parent) -> None:
    fserver.init()
    x, y, rates = torch.zeros(16), torch.zeros(16), []
    for _ in range(3):
        before, begin = wakes(), time.monotonic()
        while time.monotonic() < begin + 0.7:
            fserver.wait(fserver.push_pull([x], [0], [y], [0]))
        seconds = time.monotonic() - begin
        after = wakes()
        mine = str(threading.get_native_id())
        most = max(after[t] - n for t, n in before.items() if t in after and t != mine)
        rates.append(most / seconds)
    fserver.wait(fserver.push_pull([x], [1], [], []))
    fserver.stop()
    parent.put(sorted(rates)[1])


def echoing_server(parent: Parent) -> None:
    fserver.init()
    keys = [0]
    while keys != [1]:
        [(handler, tensors, keys)] = fserver.get_batch()
        fserver.respond(tensors if keys == [0] else [], handler)
    fserver.stop()


@pytest.mark.parametrize("progress", ["caller", "thread"])
def test_no_thread_wakes_all_the_time(child: MakeChild, port: int, progress: str) -> None:
    """While a caller drives, nothing else takes his core: least of all Go's monitor, which looks
    every 20 us while it finds goroutines that are in a system call for long."""
    how = {"FSERVER_PROGRESS": progress}
    worker = child(exchanging_worker, **environment_of("worker", port, **how))
    server = child(echoing_server, **environment_of("server", port, **how))
    scheduler = child(drop_in_scheduler, **environment_of("scheduler", port))
    rate = worker.get()
    print(f"{rate:.0f} a second")
    assert rate < 2000  # it was 3,100 and more
    for one in (worker, server, scheduler):
        one.end()
