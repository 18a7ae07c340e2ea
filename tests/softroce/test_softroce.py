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


def vm(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HERE / "vm.sh", "run", *arguments], capture_output=True, text=True, timeout=timeout
    )


def test_cases() -> None:
    """The short cases. `make softroce` runs all of them."""
    ran = subprocess.run(
        [HERE / "check.sh", "devices", "inproc"], capture_output=True, text=True, timeout=400
    )
    print(ran.stdout + ran.stderr)
    assert ran.returncode == 0
    assert "softroce: 2 cases passed" in ran.stdout


def test_status_and_time() -> None:
    failed = vm("--bare", "--", "bash", "-c", "echo out; echo err >/dev/stderr; exit 7")
    assert failed.returncode == 7, failed.stderr
    assert failed.stdout == "out\nerr\n"
    late = vm("--bare", "--time", "60", "--", "bash", "-c", "echo begun; sleep 1000")
    assert late.returncode == 124
    assert "Last line: begun" in late.stderr
