"""`fserver run`: what it prints when processes fail or are interrupted."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import BOUND, DRIVER, FOREVER, Run, environment, meet

from fserver.run import output, tracebacks

LOST = """
    from fserver.errors import PeerLostError
    {}
    raise PeerLostError("worker 0 is gone")
"""
CAUSE = "raise KeyError('layer 3')"


def pids_away(text: str) -> list[str]:
    return re.sub(r" \(pid \d+\)", "", text).splitlines()


def test_the_cause_comes_first_and_others_without_traceback(tmp_path: Path):
    """The servers lose the worker and end before it does."""
    ready = meet(tmp_path, 3)
    slow = f"import atexit; {ready}; atexit.register(time.sleep, 0.4)\n\n{CAUSE}"
    servers = [("server", i, LOST.format(ready)) for i in (0, 1)]
    with Run(*servers, ("worker", 0, slow), ("worker", 1, FOREVER)) as run:
        status, _, err, _ = run.end()
    assert status == 1
    assert pids_away(err) == [
        "[worker 0] Traceback (most recent call last):",
        '[worker 0]   File "<string>", line 3, in <module>',
        "[worker 0] KeyError: 'layer 3'",
        "fserver run: worker 0 failed with status 1: KeyError: 'layer 3'",
        "fserver run: ending worker 1",
        "fserver run: server 0, server 1 ended with fserver.errors.PeerLostError: worker 0 is gone "
        "(<string>, line 4)",
    ]


def test_a_cause_that_ends_late_is_waited_for(tmp_path: Path):
    ready = meet(tmp_path, 2)
    slow = f"import atexit; {ready}\natexit.register(time.sleep, 2.5)\n{CAUSE}"
    with Run(("server", 0, LOST.format(ready)), ("worker", 0, slow)) as run:
        lines = [run.popen.stderr.readline() for _ in range(3)]
        assert lines[-1] == "[worker 0] KeyError: 'layer 3'\n"
        assert run.popen.poll() is None  # it is printed at once
        _, _, err, _ = run.end()
    assert pids_away(err)[0] == "fserver run: worker 0 failed with status 1: KeyError: 'layer 3'"


def test_a_lost_process_that_ends_late_and_silently_is_waited_for(tmp_path: Path):
    """Its node has ended, and it itself needs longer than it takes the server to fail."""
    ready = meet(tmp_path, 2)
    slow = f"import atexit; {ready}\natexit.register(time.sleep, 2.5)\nraise SystemExit(3)"
    with Run(("server", 0, LOST.format(ready)), ("worker", 0, slow)) as run:
        status, _, err, _ = run.end()
    assert status == 3
    assert pids_away(err)[0] == "fserver run: worker 0 failed with status 3"


@pytest.mark.parametrize("speech", ["time.sleep(600)", "while True: print('x' * 1000)"])
def test_a_signal_that_ends_the_reader_too_leaves_time_to_end(tmp_path: Path, speech: str):
    """As Ctrl-C does in `fserver run |& tee log`."""
    polite = f"""
        import signal, sys, time
        def end(*_):
            time.sleep(0.5)
            sys.exit(open({str(tmp_path / "saved")!r}, 'w').close())
        signal.signal(signal.SIGINT, end)
        print('ready', flush=True)
        {speech}
    """
    with Run(("worker", 0, polite), stderr=subprocess.STDOUT) as run:
        run.wait_for("[worker 0] ready")
        run.popen.send_signal(signal.SIGINT)
        run.popen.stdout.close()
        assert run.popen.wait(BOUND) == 0
    assert (tmp_path / "saved").exists()


def test_a_reader_that_leaves_a_run_that_has_failed(tmp_path: Path):
    """The others have the time to end that they always have."""
    saves = f"""
        import signal, sys, time
        def end(*_):
            time.sleep(0.5)
            sys.exit(open({str(tmp_path / "saved")!r}, 'w').close())
        signal.signal(signal.SIGTERM, end)
        print('ready', flush=True)
        time.sleep(600)
    """
    fails = f"{meet(tmp_path, 2)}\nraise SystemExit(3)"
    with Run(("worker", 0, saves), ("worker", 1, fails), stderr=subprocess.STDOUT) as run:
        run.wait_for("[worker 0] ready")
        run.popen.stdout.close()
        (tmp_path / "read").touch()  # worker 1 fails when two are there
        assert run.popen.wait(BOUND) == 3
    assert (tmp_path / "saved").exists()


def test_an_error_from_a_lost_peer_is_no_cause(tmp_path: Path):
    ready = meet(tmp_path, 2)
    chained = f"""
        from fserver.errors import PeerLostError; {ready}
        try:
            raise PeerLostError("worker 0 is gone")
        except PeerLostError as error:
            raise ValueError("no answer") from error
    """
    with Run(("server", 0, chained), ("worker", 0, f"{ready}; time.sleep(.3)\n{CAUSE}")) as run:
        _, _, err, _ = run.end()
    assert pids_away(err)[-2:] == [
        "fserver run: worker 0 failed with status 1: KeyError: 'layer 3'",
        "fserver run: server 0 ended with ValueError: no answer (<string>, line 6)",
    ]
    assert err.count("Traceback") == 1


def test_where_all_have_lost_a_peer_the_first_shows_its_traceback():
    """The peer was on another host."""
    with Run(("server", 0, LOST.format("")), ("server", 1, LOST.format(""))) as run:
        _, _, err, _ = run.end()
    assert err.count("Traceback") == 1
    assert len(re.findall("failed with status 1: fserver.errors.PeerLostError", err)) == 1


def test_the_same_error_everywhere_is_printed_once():
    with Run(*(("worker", i, CAUSE) for i in range(3))) as run:
        _, _, err, _ = run.end()
    assert err.count("Traceback") == 1
    assert re.search(
        r"worker \d, worker \d ended with KeyError: 'layer 3' \(<string>, line 1\)", err
    )


@pytest.mark.parametrize("first, second", [(0.5, 0), (2, 0)])
def test_the_same_error_of_a_process_that_ends_first(tmp_path, first, second):
    """The other one has printed it, and ends after this one, or much later."""
    slow = f"import atexit; {meet(tmp_path, 2)}\n{{}}atexit.register(time.sleep, {{}})\n{CAUSE}"
    late = slow.format("time.sleep(0.3)\n", second)
    with Run(("worker", 0, slow.format("", first)), ("worker", 1, late)) as run:
        _, _, err, _ = run.end()
    assert err.count("Traceback") == 1


def test_two_causes_are_both_printed():
    with Run(("worker", 0, CAUSE), ("worker", 1, "raise ValueError('other')")) as run:
        _, _, err, _ = run.end()
    assert err.count("Traceback") == 2


def test_the_last_line_of_a_program_that_printed_no_traceback():
    log = "2026-11-25T12:57:38.319Z\\tINFO\\tworker 0\\tclosed"
    code = f"import sys; print('disk full\\n{log}', file=sys.stderr); sys.exit(3)"
    with Run(("worker", 0, code)) as run:
        _, _, err, _ = run.end()
    assert pids_away(err) == [
        "[worker 0] disk full",
        "[worker 0] 2026-11-25T12:57:38.319Z\tINFO\tworker 0\tclosed",
        "fserver run: worker 0 failed with status 3: its last line of standard error is: disk full",
    ]


def test_a_process_that_is_killed(tmp_path: Path):
    ready = meet(tmp_path, 2)
    kill = f"{ready}; os.kill(os.getpid(), 9)"
    worker = LOST.format(f"{ready}; time.sleep(0.3)")
    with Run(("server", 0, kill), ("worker", 0, worker)) as run:
        status, _, err, _ = run.end()
    assert status == 137
    told = "fserver run: ending worker 0"  # where it takes a second to end
    assert [line for line in pids_away(err) if line != told] == [
        "fserver run: server 0 was killed by SIGKILL: if you did not kill it, the host may have "
        "run out of memory (see dmesg)",
        "fserver run: worker 0 ended with fserver.errors.PeerLostError: worker 0 is gone "
        "(<string>, line 4)",
    ]


def test_ctrl_c_says_where_each_process_was():
    with Run(("worker", 0, FOREVER), ("worker", 1, FOREVER)) as run:
        run.wait_for("[worker 0] ready", "[worker 1] ready")
        run.popen.send_signal(signal.SIGINT)
        status, _, err, _ = run.end()
    assert status == 130
    assert err.splitlines() == [
        "fserver run: passed SIGINT on to worker 0, worker 1 (those that run for 60 s more are "
        "killed, and at once with a second signal)",
        "fserver run: worker 0, worker 1 ended with KeyboardInterrupt (<string>, line 1)",
    ]


def test_a_limit_of_years():
    with Run(("server", 0, "import time; time.sleep(0.5)"), ("worker", 0, ""), grace=1e9) as run:
        status, _, err, _ = run.end()
    assert (status, err) == (0, "")


def test_a_line_while_another_one_waits():
    """A signal is heard while a write waits for a reader."""
    read, to = os.pipe()
    os.set_blocking(to, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(to, b"\n" * select.PIPE_BUF)
    os.set_blocking(to, True)
    taken = []

    def late() -> bool:
        if len(taken) == 0:
            screen.lines(to, [b"said"])
        taken.append(os.read(read, select.PIPE_BUF))
        return False

    screen = output.Screen(late=late)
    screen.tty[to] = False
    screen.lines(to, [b"y" * 3 * select.PIPE_BUF])
    os.close(to)
    with open(read, "rb") as rest:
        lines = (b"".join(taken) + rest.read()).split(b"\n")
    assert lines[-3:] == [b"y" * 3 * select.PIPE_BUF, b"said", b""]


def test_a_signal_while_nobody_takes_the_output():
    talks = "print('ready', flush=True)\nwhile True: print('x' * 1000)"
    with Run(("worker", 0, talks), grace=0.5) as run:
        run.wait_for("[worker 0] ready")
        time.sleep(1)  # the pipe is full long before
        run.popen.send_signal(signal.SIGTERM)
        assert run.popen.wait(BOUND) == 128 + signal.SIGTERM


def test_a_process_that_does_not_end_is_named(tmp_path: Path):
    ready = meet(tmp_path, 2)
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); {ready}\n{FOREVER}"
    failing = f"{ready}; raise SystemExit(3)"
    with Run(("server", 0, deaf), ("worker", 0, failing), grace=0.3) as run:
        _, _, err, _ = run.end()
    assert pids_away(err)[1:] == [
        "fserver run: ending server 0",
        "fserver run: killed server 0, still running after the request to end",
    ]


@pytest.mark.parametrize("then", ["print('more', file=sys.stderr)", "time.sleep(600)"])
def test_a_traceback_of_a_program_that_goes_on_is_printed(then):
    code = f"""
        import sys, time, traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        {then}
    """
    with Run(("worker", 0, code)) as run:
        lines = [run.popen.stderr.readline() for _ in range(3)]
        if "more" in then:
            assert run.end()[0] == 0
    assert "ZeroDivisionError" in "".join(lines)


def test_a_traceback_is_not_held_back_for_ever(monkeypatch):
    """The program has lost a peer and goes on."""
    begin = "processes = ["
    monkeypatch.setattr("test_run.DRIVER", DRIVER.replace(begin, f"supervisor.HOLD = 0.3\n{begin}"))
    code = """
        import time, traceback
        from fserver.errors import PeerLostError
        try:
            raise PeerLostError("worker 0 is gone")
        except PeerLostError:
            traceback.print_exc()
        time.sleep(600)
    """
    with Run(("worker", 0, code)) as run:
        lines = [run.popen.stderr.readline() for _ in range(3)]
    assert lines[0].startswith("[worker 0] Traceback") and "PeerLostError" in lines[-1]


def test_lines_after_a_traceback_are_not_lost(tmp_path: Path):
    ready = meet(tmp_path, 2)
    code = LOST.format(f"import atexit, os; atexit.register(os.write, 2, b'closed\\n'); {ready}")
    with Run(("server", 0, code), ("worker", 0, f"{ready}\n{CAUSE}")) as run:
        _, _, err, _ = run.end()
    assert "[server 0] closed" in err.splitlines()
    assert err.count("Traceback") == 1


def test_a_wrong_setting_is_printed_once(tmp_path):
    script = tmp_path / "node.py"
    script.write_text("import fserver\nfserver.Worker.from_env()\n")
    env = {**environment(), "FSERVER_LOG": "loud"}
    done = subprocess.run(
        [sys.executable, "-m", "fserver", "run", "--workers=2", str(script)],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("Traceback") <= 1, done.stderr
    wrong = 'conf: FSERVER_LOG="loud": want error, warn, info or debug'
    assert re.search(
        rf"fserver run: \w+( \d)? \(pid \d+\) failed with status 1: .*{wrong}", done.stderr
    )


def test_place_is_in_the_users_program():
    lines = f"""\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in main
    y.wait()
  File "{Path(tracebacks.__file__).parents[1]}/handle.py", line 50, in wait
    self.node.wait()

KeyboardInterrupt""".encode().splitlines()
    raised, others = tracebacks.split([b"before", *lines, b"after"])
    assert raised == tracebacks.Raised("KeyboardInterrupt", "", "train.py, line 12")
    assert others == [b"before", b"after"]


# -- output that cannot be written


def test_a_full_disk_ends_nothing(tmp_path: Path):
    end = f"print('a line'); open({str(tmp_path / 'end')!r}, 'w').write('reached')"
    with open("/dev/full", "w") as full:
        with Run(("worker", 0, end), stdout=full, stderr=full) as run:
            assert run.popen.wait(BOUND) == 0
    assert (tmp_path / "end").read_text() == "reached"


def test_a_terminal_that_is_gone(tmp_path: Path):
    """The signal that tells of it is passed on, and the processes have their time to end."""
    end = tmp_path / "end"
    saves = f"""
        import signal, sys, time
        def save(*_):
            time.sleep(0.2)
            open({str(end)!r}, 'w').write('saved')
            sys.exit()
        signal.signal(signal.SIGHUP, save)
        print('ready')
        time.sleep(600)
    """
    ours, theirs = pty.openpty()
    with Run(("worker", 0, saves), stdout=theirs, stderr=theirs, grace=BOUND) as run:
        os.close(theirs)
        seen = b""
        while b"ready" not in seen:
            assert select.select([ours], [], [], BOUND)[0]
            seen += os.read(ours, 1 << 12)
        os.close(ours)
        run.popen.send_signal(signal.SIGHUP)
        assert run.popen.wait(BOUND) == 0
    assert end.read_text() == "saved"
