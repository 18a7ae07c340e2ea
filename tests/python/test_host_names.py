"""Where a scheduler that is named by a host name listens, by what /etc/hosts says of the name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_containers import needs

import fserver

ROOT = Path(fserver.__file__).resolve().parents[1]
# In namespaces of its own: one interface beside loopback, and another /etc/hosts.
HOST = """
ip link set lo up
ip link add a0 type veth peer name b0
ip addr add 10.77.0.1/24 dev a0
ip link set a0 up
ip link set b0 up
mount --bind "$1" /etc/hosts
exec "$2" -c "$3"
"""
NODES = """
import fserver
try:
    scheduler = fserver.Scheduler(scheduler="here.test:0", connect=False)
    at = scheduler.scheduler.rpartition(":")
    server = fserver.Server(scheduler=f"here.test:{at[2]}", backend="CPU", connect=False)
    print(at[0], server.address.rpartition(":")[0])
except fserver.ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("addresses", "said", "warned"),
    [
        pytest.param(["10.77.0.1"], "10.77.0.1 10.77.0.1", False, marks=pytest.mark.long),
        pytest.param(
            ["127.0.1.1", "10.77.0.1"], "10.77.0.1 10.77.0.1", False, marks=pytest.mark.long
        ),
        pytest.param(
            ["10.77.0.9", "10.77.0.1"], "10.77.0.1 10.77.0.1", False, marks=pytest.mark.long
        ),
        (["127.0.1.1"], "127.0.1.1 127.0.0.1", True),
        (["10.77.0.8", "10.77.0.9"], "this host has none of these addresses", False),
    ],
)
def test_a_name_means_this_host(
    tmp_path: Path, addresses: list[str], said: str, warned: bool
) -> None:
    needs("unshare", "ip", "mount")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} here.test\n" for a in addresses))
    alone = ["unshare", "--net", "--mount", "bash", "-euc", HOST, "host"]
    done = subprocess.run(
        [*alone, str(hosts), sys.executable, NODES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said in done.stdout, done.stdout + done.stderr
    assert ("so other hosts cannot connect" in done.stderr) == warned
