"""The emulated machine with two RDMA devices, where `make softroce` has been run before."""

import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def machine() -> None:
    missing = subprocess.run([HERE / "image.sh", "--check"], capture_output=True, text=True)
    if missing.returncode != 0:
        pytest.skip(missing.stderr.strip().replace("\n", "; "))


def run(*command: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    print(ran.stdout + ran.stderr)
    return ran


def test_short_cases() -> None:
    """`make softroce` runs all cases; these are short enough for `make test`."""
    ran = run(HERE / "check.sh", "devices")
    assert ran.returncode == 0
    assert "softroce: 1 cases passed" in ran.stdout


def test_a_case_that_does_not_exist() -> None:
    ran = run(HERE / "check.sh", "device")
    assert ran.returncode == 2
    assert "device: no such case" in ran.stderr


@pytest.mark.long  # boots a machine for it
def test_output_and_status() -> None:
    command = "echo out; echo err >/dev/stderr; exit 7"
    ran = run(HERE / "vm.sh", "run", "--bare", "--", "bash", "-c", command)
    assert ran.returncode == 7
    assert ran.stdout == "out\nerr\n"


def test_time_is_over() -> None:
    ran = run(HERE / "vm.sh", "run", "--time", "2", "--", "true")
    assert ran.returncode == 124
    assert "vm.sh: 2 s are over (--time)" in ran.stderr


def test_wrong_options() -> None:
    for options, complaint in {
        ("--time", "soon", "--", "true"): "--time soon: want a number from 1",
        ("--cores", "3"): "--cores: want --time,",
        ("--bare", "--"): "no command after --",
    }.items():
        ran = run(HERE / "vm.sh", "run", *options)
        assert ran.returncode == 2
        assert complaint in ran.stderr
