"""`fserver run`: what it starts, what it prints, and how everything ends."""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fserver import Error, Scheduler, Server, Worker, env
from fserver.command import command as again
from fserver.run import gpus, output, roles
from fserver.run.roles import Layout, inherited, plan

ROOT = Path(__file__).parents[2]
FOREVER = "import time; print('ready', flush=True); time.sleep(600)"
BOUND = 60  # seconds, for everything that should take far less


# -- running it


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def fserver(*args: str, bound: float = BOUND) -> subprocess.CompletedProcess:
    """The command line, to its end."""
    command = [sys.executable, "-m", "fserver", *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=bound)


DRIVER = """
import json, sys
from fserver.run.roles import Process
from fserver.run import supervisor
from fserver.run.supervisor import Supervisor
processes = [
    Process(role, rank, (sys.executable, "-c", code), {"NAME": f"{role}-{rank}"})
    for role, rank, code in json.loads(sys.argv[1])
]
sys.exit(Supervisor(processes, float(sys.argv[2]), sys.argv[3] == "1").run())
"""


class Run:
    """A supervisor in a process of its own, over Python one-liners: (role, rank, code)."""

    def __init__(self, *processes, grace: float = BOUND, several_hosts: bool = False, **kwargs):
        spec = [(role, rank, textwrap.dedent(code)) for role, rank, code in processes]
        self.began = time.monotonic()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(spec), str(grace), str(int(several_hosts))],
            env=environment(),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs},
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_) -> None:
        with self.popen:
            self.popen.kill()

    def wait_for(self, *lines: str) -> list[str]:
        """Reads standard output until all these lines have come; returns all that came."""
        wanted, seen = set(lines), []
        while wanted:
            line = self.popen.stdout.readline()
            assert line, f"ended before {wanted}: {seen}, {self.popen.stderr.read()}"
            seen.append(line.rstrip("\n"))
            wanted.discard(seen[-1])
        return seen

    def end(self) -> tuple[int, str, str, float]:
        """(status, stdout, stderr, seconds since the start)."""
        out, err = self.popen.communicate(timeout=BOUND)
        return self.popen.returncode, out, err, time.monotonic() - self.began


def meet(folder: Path, count: int) -> str:
    """A line of code that waits until so many processes have come to it, however long each of them
    has taken to import what it needs."""
    at = repr(str(folder))
    wait = f"[time.sleep(0.01) for _ in iter(lambda: len(os.listdir({at})) < {count}, False)]"
    return f"import os, time; open(os.path.join({at}, str(os.getpid())), 'w').close(); {wait}"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(*pids: int) -> None:
    until = time.monotonic() + BOUND
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.01)


# -- the end


def test_all_well():
    with Run(("scheduler", 0, ""), ("server", 0, ""), ("worker", 0, ""), ("worker", 1, "")) as run:
        status, out, err, _ = run.end()
    assert (status, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [
        ("raise SystemExit(7)", 7, "failed with status 7"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "was killed by SIGKILL: if you did not .*dmesg.*",
        ),
        ("import os; os.kill(os.getpid(), 6)", 134, "was killed by SIGABRT"),
        ("raise SystemExit(255)", 255, "failed with status 255"),
    ],
)
@pytest.mark.parametrize("role", ["worker", "server", "scheduler"])
def test_one_failure_ends_all(role, code, status, how):
    others = [("server", 5, FOREVER), ("worker", 5, FOREVER)]
    with Run((role, 0, code), *others, grace=BOUND) as run:
        got, _, err, seconds = run.end()
    assert got == status
    name = role if role == "scheduler" else f"{role} 0"
    first, second = err.splitlines()
    assert re.fullmatch(rf"fserver run: {name} \(pid \d+\) {how}", first)
    assert second == "fserver run: ending server 5, worker 5"
    assert seconds < BOUND / 2


def test_the_cause_of_a_failure_counts(tmp_path):
    """A worker says how it failed, but its peer is faster to fail for the loss of it."""
    ready = meet(tmp_path, 2)
    peer = f"{ready}; raise SystemExit(1)"
    worker = f"{ready}; time.sleep(0.1); raise SystemExit(3)"
    with Run(("server", 0, peer), ("worker", 0, worker)) as run:
        status, _, err, _ = run.end()
    assert status == 3
    assert [line.partition(" (pid")[0] + line[-2:] for line in err.splitlines()] == [
        "fserver run: worker 0 3",
        "fserver run: server 0 1",
    ]


def test_those_that_are_told_to_end_do_not_count():
    told = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(3))\n" + FOREVER
    with Run(("server", 0, told), ("worker", 0, "raise SystemExit(1)")) as run:
        assert run.end()[0] == 1


def test_who_ignores_the_request_to_end_is_killed():
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)\n" + FOREVER
    mortal = "import os; print(os.getpid(), flush=True)\n" + FOREVER
    with Run(("server", 0, deaf), ("worker", 0, mortal), grace=0.3) as run:
        seen = run.wait_for("[server 0] ready", "[worker 0] ready")
        os.kill(next(int(line.split()[-1]) for line in seen if line[-1].isdigit()), signal.SIGKILL)
        status, _, _, seconds = run.end()
    assert status == 137
    assert seconds < BOUND / 2


def test_a_command_that_cannot_be_started():
    done = fserver("run", "--", "/no/such/program")
    assert done.returncode == 127
    assert "fserver run: cannot start /no/such/program: No such file or directory" in done.stderr


def test_more_processes_than_descriptors():
    command = f"ulimit -n 16; exec {sys.executable} -m fserver run --workers 9 -- sleep 60"
    run = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=BOUND
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    assert "of 11: Too many open files (start fewer on this host" in run.stderr


def test_servers_that_stay_are_ended_without_failure():
    with Run(("scheduler", 0, FOREVER), ("server", 0, FOREVER), ("worker", 0, ""), grace=0.3) as r:
        status, _, err, _ = r.end()
    assert status == 0
    assert err == (
        "fserver run: scheduler, server 0: still running 0.3 s after the last worker ended, "
        "so ended by the launcher\n"
    )


def test_servers_get_time_to_end_and_can_still_fail():
    slow = "import time; time.sleep(0.5); print('bye')"
    with Run(("server", 0, slow), ("worker", 0, "")) as run:
        assert run.end()[:3] == (0, "[server 0] bye\n", "")
    with Run(("server", 0, slow + "; raise SystemExit(4)"), ("worker", 0, "")) as run:
        assert run.end()[0] == 4


def test_one_of_several_hosts_waits_for_its_servers():
    slow = "import time; time.sleep(1); print('bye')"
    with Run(("server", 0, slow), ("worker", 0, ""), grace=0.1, several_hosts=True) as run:
        assert run.end()[:3] == (0, "[server 0] bye\n", "")


# -- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(number):
    roles = [("scheduler", 0, FOREVER), ("server", 0, FOREVER), ("worker", 0, FOREVER)]
    with Run(*roles, grace=BOUND) as run:
        run.wait_for("[scheduler] ready", "[server 0] ready", "[worker 0] ready")
        run.popen.send_signal(number)
        status, _, err, seconds = run.end()
    assert status == 128 + number
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert seconds < BOUND / 2


def test_a_signal_may_end_the_run_well():
    polite = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye')))
        print('ready')
        time.sleep(600)
    """
    with Run(("scheduler", 0, FOREVER), ("worker", 0, polite), ("worker", 1, polite)) as run:
        run.wait_for("[scheduler] ready", "[worker 0] ready", "[worker 1] ready")
        run.popen.terminate()
        status, out, _, _ = run.end()
    assert status == 0
    assert sorted(out.splitlines()) == ["[worker 0] bye", "[worker 1] bye"]


def test_the_second_signal_kills():
    deaf = "import signal; signal.signal(2, lambda *_: print('no', flush=True))\n" + FOREVER
    with Run(("worker", 0, deaf), grace=600) as run:
        run.wait_for("[worker 0] ready")
        run.popen.send_signal(signal.SIGINT)
        run.wait_for("[worker 0] no")
        run.popen.send_signal(signal.SIGINT)
        assert run.end()[0] == 130


def test_nothing_outlives_a_killed_launcher():
    code = "import os; print(os.getpid(), flush=True)\n" + FOREVER
    with Run(("scheduler", 0, code), ("server", 0, code), ("worker", 0, code)) as run:
        seen = run.wait_for("[scheduler] ready", "[server 0] ready", "[worker 0] ready")
        pids = [int(line.split()[-1]) for line in seen if line[-1].isdigit()]
        assert len(pids) == 3
        run.popen.kill()
        wait_gone(*pids)


def test_what_a_process_has_started_ends_with_it():
    code = """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid)
    """
    with Run(("worker", 0, code)) as run:
        status, out, _, seconds = run.end()
    assert status == 0
    wait_gone(int(out.split()[-1]))
    assert seconds < BOUND / 2


# -- output


def test_lines_carry_role_and_rank():
    code = """
        import os, sys
        print("out of", os.environ["NAME"])
        print("err", file=sys.stderr)
        sys.stdout.write("no newline")
    """
    with Run(("worker", 3, code), ("server", 0, code)) as run:
        status, out, err, _ = run.end()
    assert status == 0
    lines = out.splitlines()
    assert [x for x in lines if "worker" in x] == [
        "[worker 3] out of worker-3",
        "[worker 3] no newline",
    ]
    assert [x for x in lines if "server" in x] == [
        "[server 0] out of server-0",
        "[server 0] no newline",
    ]
    assert sorted(err.splitlines()) == ["[server 0] err", "[worker 3] err"]


def test_lines_come_at_once_and_whole():
    code = """
        import sys, time
        for part in ("half ", "and half\\n"):
            sys.stdout.write(part)
            sys.stdout.flush()
        time.sleep(600)
    """
    with Run(("worker", 0, code)) as run:
        assert run.wait_for("[worker 0] half and half") == ["[worker 0] half and half"]


def test_much_output_is_not_mixed():
    code = "import os\nfor i in range(2000): print(os.environ['NAME'], i, 'x' * 50)"
    with Run(("worker", 0, code), ("worker", 1, code)) as run:
        _, out, _, _ = run.end()
    for rank in (0, 1):
        mine = [line for line in out.splitlines() if line.startswith(f"[worker {rank}] ")]
        assert mine == [f"[worker {rank}] worker-{rank} {i} {'x' * 50}" for i in range(2000)]


def test_a_reader_that_leaves_ends_all():
    code = "import os; print(os.getpid())\nwhile True: print('x' * 1000)"
    with Run(("worker", 0, code)) as run:
        pid = int(run.popen.stdout.readline().split()[-1])
        run.popen.stdout.close()
        assert run.popen.wait(BOUND) == 128 + signal.SIGPIPE
        wait_gone(pid)
        assert run.popen.stderr.read() == ""


class Recorder(output.Screen):
    def __init__(self, tty: bool):
        super().__init__()
        self.tty = {1: tty, 2: tty}
        self.text = b""
        output.write = lambda fd, data, late: setattr(self, "text", self.text + data)


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setattr(output, "write", output.write)  # puts it back
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    return Recorder


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([b"a\nb\n"], b"[w] a\n[w] b\n"),
        ([b"a", b"b", b"\n"], b"[w] ab\n"),
        ([b"\n"], b"[w] \n"),
        ([b"10%\r20%\r", b"30%\n"], b"[w] 30%\n"),
        ([b"\r10%", b"\r20%", b"\r30%"], b"[w] 30%\n"),
        ([b"10%\r", b"\r\n"], b"[w] 10%\n"),
        ([b"dos\r\nlines\r", b"\n"], b"[w] dos\n[w] lines\n"),
        ([b"bar\r   \r"], b""),
        ([b"x" * (1 << 17)], b"[w] " + b"x" * (1 << 17) + b"\n"),
        ([b"\xff\xfe\n"], b"[w] \xff\xfe\n"),
    ],
)
def test_a_line_is_what_a_terminal_shows_at_its_end(screen, chunks, text):
    recorder = screen(tty=False)
    stream = recorder.stream(1, "w", 0)
    for chunk in chunks:
        stream.feed(chunk)
    stream.close()
    recorder.close()
    assert recorder.text == text


def test_a_moving_bar_stands_below_the_lines_of_a_terminal(screen):
    recorder = screen(tty=True)
    bar, lines = recorder.stream(2, "a", 0), recorder.stream(1, "b", 1)
    bar.feed(b"\r50% " + "█".encode() * 100)
    lines.feed(b"hello\n")
    bar.feed(b"\r60%")
    recorder.close()
    erase = b"\r\x1b[K"
    room = 40 - len("[a] ") - 1 - len("50% ")
    assert recorder.text == (
        erase + b"[a] 50% " + "█".encode() * room  # cut: a wrapped line cannot be erased
        + erase + b"[b] hello\n"
        + erase + b"[a] 60%"
        + erase
    )  # fmt: skip


def test_colours_only_on_a_terminal():
    ours, theirs = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    command = [
        sys.executable,
        "-c",
        DRIVER,
        json.dumps([("worker", 0, "print('hello')")]),
        "1",
        "0",
    ]
    popen = subprocess.Popen(command, env={**env, "PYTHONPATH": str(ROOT)}, stdout=theirs)
    os.close(theirs)
    try:
        assert select.select([ours], [], [], BOUND)[0]
        assert b"\x1b[36m[worker 0] \x1b[0mhello" in os.read(ours, 1 << 12)
        assert popen.wait(BOUND) == 0
    finally:
        popen.kill()
        popen.wait()
        os.close(ours)


# -- who runs what, where


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (Layout(2, 1), ["w0 w1 s0"]),
        (Layout(1, 1, hosts=2), ["w0", "s0"]),
        (Layout(2, 1, hosts=2), ["w0 w1", "s0"]),
        (Layout(3, 2, hosts=3), ["w0 w1", "w2 s0", "s1"]),
        (Layout(1, 1, hosts=3), ["w0", "s0", ""]),
    ],
)
def test_groups_are_dealt_to_the_hosts(layout, shares):
    for host, share in enumerate(shares):
        mine = Layout(layout.workers, layout.servers, hosts=layout.hosts, host=host)
        assert " ".join(f"{role[0]}{group}" for role, group in mine.groups()) == share


def test_environment_of_a_group():
    commands = {"worker": ("w",), "server": ("s",)}
    processes = plan(Layout(2, 1, group_size=2), ("10.0.0.1", 7000), commands, {"A": "b"})
    assert [p.name for p in processes] == [
        "scheduler", "worker 0", "worker 1", "worker 2", "worker 3", "server 0", "server 1",
    ]  # fmt: skip
    assert processes[4].command == ("w",)
    assert processes[4].env == {
        "DMLC_ROLE": "worker",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_GROUP_SIZE": "2",
        "DMLC_NODE_RANK": "1",
        "STEPMESH_GPU": "1",
        "DMLC_PS_ROOT_URI": "10.0.0.1",
        "DMLC_PS_ROOT_PORT": "7000",
        "A": "b",
    }
    assert processes[0].env["DMLC_ROLE"] == "scheduler"


@pytest.mark.parametrize(
    ("layout", "options", "worker", "server"),
    [
        # In turn, workers first: disjoint where there are enough.
        (Layout(1, 1), {"seen": 2}, [0], [1]),
        (Layout(2, 1), {"seen": 8}, [0, 1], [2]),
        (Layout(1, 1, group_size=2), {"seen": 4}, [0, 1], [2, 3]),
        (Layout(2, 1), {"seen": 2}, [0, 1], [0]),
        (Layout(1, 1), {"seen": 1}, [0], [0]),
        (Layout(2, 2, hosts=2, host=1), {"seen": 8}, [], [0, 1]),
        # Named.
        (Layout(2, 2), {"worker": [3, 1], "server": [5], "seen": 8}, [3, 1], [5, 5]),
        (Layout(2, 2), {"worker": [0, 1], "server": [0, 1]}, [0, 1], [0, 1]),
        (Layout(1, 2), {"worker": [1], "seen": 3}, [1], [0, 2]),
        (Layout(1, 1), {"server": [0], "seen": 2}, [1], [0]),
        (Layout(1, 1), {"server": [0], "seen": 1}, [0], [0]),
        (Layout(1, 1, group_size=2), {"server": [6, 7]}, [0, 1], [6, 7]),
        # The user's own.
        (Layout(1, 1), {"base": 3, "seen": 8}, [3], [3]),
        (Layout(1, 1, group_size=2), {"base": 2, "seen": 8}, [2, 3], [2, 3]),
        (Layout(1, 1), {"base": 3, "worker": [1], "seen": 8}, [1], [3]),
    ],
)
def test_gpus_are_dealt(layout, options, worker, server):
    named = {role: options[role] for role in ("worker", "server") if role in options}
    dealt = gpus.deal(layout, named, options.get("base"), options.get("seen", 0))
    assert dealt == {"worker": worker, "server": server}
    processes = plan(layout, ("h", 7000), {"worker": ("w",), "server": ("s",)}, {}, dealt)
    for process, gpu in zip(processes[layout.host == 0 :], worker + server, strict=True):
        # As the engine makes the rank, which the GPU does not change.
        assert process.env["STEPMESH_GPU"] == str(gpu)
        offset = int(process.env.get("DMLC_RANK_OFFSET", "0"))
        group = int(process.env["DMLC_NODE_RANK"])
        assert layout.group_size * group + gpu + offset == process.rank


def test_no_gpus_are_dealt():
    assert gpus.deal(Layout(2, 1), {}, None, 0) is None


def test_gpus_are_told():
    assert gpus.told({"worker": [0], "server": [1]}) == "worker on GPU 0; server on GPU 1"
    assert gpus.told({"worker": [], "server": [0, 1]}) == "servers on GPU 0,1"
    assert (
        gpus.told({"worker": [0, 1], "server": [0]})
        == "workers on GPU 0,1; server on GPU 0; processes share GPU 0"
    )


@pytest.mark.parametrize(
    ("shown", "count"),
    [
        (None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("1,-1,0", 1), ("0,2", 1),
        ("GPU-22", 1), ("MIG-a,MIG-b,MIG-c", 3), (" 0 , 1", 2),
    ],
)  # fmt: skip
def test_gpus_that_are_shown(shown, count, monkeypatch):
    monkeypatch.setattr(gpus, "_installed", lambda: 2)
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert gpus.seen(environment) == count
    for name in ("STEPMESH_BACKEND", "STEPMESH_BAKCEND"):
        assert gpus.seen({**environment, name: "cpu"}) == 0
        assert gpus.seen({**environment, name: "GPU"}) == count


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler (gcc)")
def test_a_host_with_two_gpus(tmp_path, monkeypatch):
    """They are counted by the driver's library, and what each got is said in one line."""
    library = tmp_path / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def got(*args):
        done = fserver("run", "--dry-run", *args, "--", "true")
        assert done.returncode == 0, done.stderr
        given = [
            dict(word.split("=", 1) for word in line.split() if "=" in word)
            for line in done.stdout.splitlines()[1:]
        ]
        return done.stderr, [(e["STEPMESH_GPU"], e.get("DMLC_RANK_OFFSET")) for e in given]

    one_each = ("fserver run: worker on GPU 0; server on GPU 1\n", [("0", None), ("1", "-1")])
    assert got() == one_each
    assert got("--worker-gpus", "1") == (
        "fserver run: worker on GPU 1; server on GPU 0\n", [("1", "-1"), ("0", None)],
    )  # fmt: skip
    assert got("--worker-gpus=2-3", "--server-gpus=5", "--group-size=2")[0] == (
        "fserver run: workers on GPU 2,3; servers on GPU 5,5; processes share GPU 5\n"
    )
    monkeypatch.setenv("STEPMESH_GPU", "1")
    assert got()[0] == "fserver run: worker on GPU 1; server on GPU 1; processes share GPU 1\n"
    monkeypatch.setenv("STEPMESH_BACKEND", "CPU")
    monkeypatch.delenv("STEPMESH_GPU")
    assert got() == ("", [("0", None), ("0", None)])


def test_a_gpu_of_the_user_that_is_none(monkeypatch):
    monkeypatch.setenv("STEPMESH_GPU", "first")
    done = fserver("run", "--", "true")
    assert done.returncode == 2
    assert "STEPMESH_GPU='first': want a whole number from 0 to 1023" in done.stderr


def test_identity_is_not_inherited():
    outer = {"DMLC_RANK_OFFSET": "3", "DMLC_INSTANCE_ID": "1", "DMLC_INTERFACE": "eth0"}
    assert inherited(outer) == {"DMLC_INTERFACE": "eth0"}


def test_dry_run_prints_commands_and_environment(tmp_path):
    script = tmp_path / "my script.py"
    script.touch()
    done = fserver(
        "run", "--dry-run", "--workers", "2", "--scheduler", "[::1]:7000", str(script), "--lr", "3"
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.partition("]")[0] for line in lines] == [
        "[scheduler", "[worker 0", "[worker 1", "[server 0",
    ]  # fmt: skip
    assert lines[0].endswith(shlex.join(again("scheduler")))
    assert lines[1].startswith("[worker 0] DMLC_ROLE=worker DMLC_NODE_RANK=0 STEPMESH_GPU=0 ")
    assert " DMLC_PS_ROOT_URI=::1 DMLC_PS_ROOT_PORT=7000 " in lines[1]
    assert lines[2].endswith(f"{sys.executable} '{script}' --lr 3")
    assert "SECRET" not in done.stdout


def test_several_servers_do_not_share_a_port(monkeypatch):
    monkeypatch.setenv("DMLC_PORT", "7001")
    for servers in ("1", "2"):
        done = fserver("run", "--dry-run", "--servers", servers, "--", "true")
        assert (" DMLC_PORT='' " in done.stdout) == (servers == "2")
        assert ("DMLC_PORT=7001 has no effect: the 2 servers" in done.stderr) == (servers == "2")


def test_dry_run_shows_no_secret_and_no_port_by_luck():
    done = fserver("run", "--dry-run", "--", "true")
    assert "DMLC_PS_ROOT_PORT='<free>'" in done.stdout
    assert "FSERVER_SECRET='<random>'" in done.stdout


@pytest.mark.parametrize(
    ("args", "worker", "server"),
    [
        (["-m", "pkg.mod", "-x"], [sys.executable, "-m", "pkg.mod", "-x"], None),
        (["--", "echo", "--workers", "--", "a"], ["echo", "--workers", "--", "a"], None),
        (["--no-python", "echo", "a"], ["echo", "a"], None),
        (["{script}", "--", "-m"], [sys.executable, "{script}", "--", "-m"], None),
        (
            ["--worker-script", "{script}", "--server-script", "{other}", "--", "-a", "1"],
            [sys.executable, "{script}", "-a", "1"],
            [sys.executable, "{other}", "-a", "1"],
        ),
    ],
)
def test_ways_to_name_a_command(tmp_path, args, worker, server):
    names = {"script": str(tmp_path / "w.py"), "other": str(tmp_path / "s.py")}
    for path in names.values():
        Path(path).touch()
    done = fserver("run", "--dry-run", *(a.format(**names) for a in args))
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    for role, command in (("[worker", worker), ("[server", server or worker)):
        assert lines[role].endswith(" " + " ".join(c.format(**names) for c in command))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "no command given: want SCRIPT"),
        (["--workers", "0", "x.py"], "--workers: '0': want a whole number from 1 to 65535"),
        (["--servers", "two", "x.py"], "--servers: 'two': want a whole number from 1 to 65535"),
        (["--workers", "65536", "x.py"], "--workers: '65536': want a whole number from 1 to 65535"),
        (["--servers", "9" * 5000, "x.py"], "99': want a whole number from 1 to 65535"),
        (
            ["--group-size", "1025", "x.py"],
            "--group-size: '1025': want a whole number from 1 to 1024",
        ),
        (["--nnodes", "65537", "x.py"], "--nnodes: '65537': want a whole number from 1 to 65536"),
        (
            ["--workers", "1023", "--servers", "1", "--group-size", "65", "x.py"],
            "--workers 1023 --servers 1 --group-size 65: 66560 processes, but a cluster has at "
            "most 65536 (use fewer or smaller groups)",
        ),
        (["--worker-gpus", "0,x", "x.py"], "--worker-gpus: '0,x': want GPU numbers from 0 to 1023"),
        (["--server-gpus", "1024", "x.py"], "--server-gpus: '1024': want GPU numbers from 0 to"),
        (["--server-gpus", "3-1", "x.py"], "--server-gpus: '3-1': the list is empty"),
        (["--grace", "-1", "x.py"], "--grace: '-1': want a number of seconds, 0 or more"),
        (["--scheduler", "host", "x.py"], "'host': want HOST:PORT"),
        (["--scheduler", "host:0", "x.py"], "'host:0': want HOST:PORT"),
        (["--nnodes", "2", "--", "x"], "--nnodes 2: several hosts need --scheduler HOST:PORT"),
        (["--node-rank", "1", "--", "x"], "--node-rank 1: want 0 to 0, because --nnodes is 1"),
        (
            ["--nnodes", "3", "--node-rank", "2", "--scheduler", "h:1", "--", "x"],
            "--nnodes 3: there are only 2 groups, so host 2 has no process",
        ),
        (["no such.py"], "no such.py: no such file"),
        (["--worker-script", "w.py"], "--worker-script and --server-script: give both, or neither"),
        (["-m", "--", "x"], "-m cannot be combined with --no-python"),
        (["--worker", "2", "x.py"], "--worker"),
    ],
)
def test_bad_arguments(args, text):
    done = fserver("run", *args)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_limits_are_those_of_the_settings():
    allowed = {s["name"]: s["allowed"] for s in env.settings({})["settings"]}
    for role in ("WORKER", "SERVER"):
        assert allowed[f"DMLC_NUM_{role}"] == f"a whole number from 1 to {roles.MAX_GROUPS}"
    assert allowed["DMLC_GROUP_SIZE"] == f"a whole number from 1 to {roles.MAX_GROUP_SIZE}"
    settings = {"DMLC_NUM_WORKER": roles.MAX_PROCESSES - 1, "DMLC_NUM_SERVER": 1}
    with Scheduler(scheduler="127.0.0.1:0", connect=False, settings=settings):
        pass
    settings["DMLC_NUM_SERVER"] += 1
    with pytest.raises(Error, match=f"more than {roles.MAX_PROCESSES}"):
        Scheduler(scheduler="127.0.0.1:0", connect=False, settings=settings)


def test_unknown_command():
    done = fserver("fly")
    assert done.returncode == 2
    assert "fserver: no such command: fly" in done.stderr
    assert "  run " in fserver("--help").stdout


# -- with the engine

CLUSTER = """
import os, torch, fserver
if os.environ["DMLC_ROLE"] == "worker":
    with fserver.Worker.from_env() as worker:
        x, y = torch.full((3,), worker.rank + 1.0), torch.empty(3)
        worker.wait(worker.push_pull([x], [0], [y], [0]))
        print("got", y.tolist())
else:
    with fserver.Server.from_env() as server:
        try:
            while True:
                for handler, tensors, _ in server.get_batch():
                    server.respond([tensors[0] * 2], handler)
        except fserver.ClosedError:
            print("no more")
"""


@pytest.fixture
def cluster_script(tmp_path) -> str:
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    return str(script)


@pytest.mark.long  # the next one starts a cluster too
@pytest.mark.parametrize("lists", [(), ("--worker-gpus", "5,3", "--server-gpus", "0,7")])
def test_a_cluster_on_one_host(cluster_script, lists, monkeypatch):
    """The ranks are the same whatever the GPUs are."""
    monkeypatch.setenv("STEPMESH_BACKEND", "CPU")
    done = fserver("run", "--group-size", "2", *lists, cluster_script, bound=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[server 0] no more",
        "[server 1] no more",
        "[worker 0] got [2.0, 2.0, 2.0]",
        "[worker 1] got [4.0, 4.0, 4.0]",
    ]
    assert "still running" not in done.stderr  # the scheduler ended by itself


def test_a_cluster_of_two_launchers(cluster_script):
    with socket.socket() as holder:  # as the launcher does where it chooses the port
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        scheduler = f"127.0.0.1:{holder.getsockname()[1]}"
        common = ["--nnodes=2", f"--scheduler={scheduler}", cluster_script]
        with ThreadPoolExecutor() as pool:
            hosts = [
                pool.submit(fserver, "run", f"--node-rank={i}", *common, bound=120) for i in (0, 1)
            ]
            done = [host.result() for host in hosts]
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert done[0].stdout == "[worker 0] got [2.0, 2.0, 2.0]\n"
    assert done[1].stdout == "[server 0] no more\n"


@pytest.mark.long
def test_status_of_the_one_that_failed(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(CLUSTER.replace('print("got", y.tolist())', "raise SystemExit(3)"))
    done = fserver("run", str(script), bound=120)
    assert done.returncode == 3, done.stderr
    assert re.search(r"fserver run: worker 0 \(pid \d+\) failed with status 3", done.stderr)


def test_scheduler_says_where_it_listens():
    """Also at a port that it has chosen: the others join there."""
    env = {**environment(), "DMLC_PS_ROOT_PORT": "0"}
    command = [sys.executable, "-m", "fserver", "scheduler"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            address = re.fullmatch(r"fserver scheduler: listening at (127\.0\.0\.1:\d+)\n", line)[1]
            nodes = [kind(scheduler=address, connect=False) for kind in (Worker, Server)]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda node: node.connect(), nodes))
                list(pool.map(lambda node: node.stop(), nodes))
            assert process.wait(BOUND) == 0
        finally:
            process.kill()


def test_scheduler_says_what_is_wrong():
    env = {**environment(), "DMLC_PS_ROOT_PORT": "many"}
    done = subprocess.run(
        [sys.executable, "-m", "fserver", "scheduler"],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("fserver scheduler: conf: DMLC_PS_ROOT_PORT")
    assert "Traceback" not in done.stderr
