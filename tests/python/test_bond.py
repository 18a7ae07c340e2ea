"""`fserver bench bond` over two links of one network namespace, and between two namespaces."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_containers import needs

from fserver import bench
from fserver.bench import bond

LINKS = """
ip link set lo up
for link in 0 1; do
  ip link add a$link type veth peer name b$link
  ip addr add 10.77.$link.1/24 dev a$link
  ip addr add 10.77.$link.2/24 dev b$link
  ip link set a$link up
  ip link set b$link up
done
exec "$@"
"""


def test_two_interfaces(tmp_path: Path) -> None:
    needs("unshare", "ip")
    out = tmp_path / "bond.json"
    options = "--interfaces a0,a1 --server-interfaces b0,b1 --sizes 4K,1M --rounds 2 --iters 5"
    command = [sys.executable, "-m", "fserver", "bench", "bond", *options.split(), "--json", out]
    alone = ["unshare", "--net", "bash", "-euc", LINKS, "links"]
    ran = subprocess.run([*alone, *command], capture_output=True, text=True, timeout=240)
    print(ran.stdout + ran.stderr)
    assert ran.returncode == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["over"], r["bytes_out"]) for r in rows] == [
        ("a0", 4096),
        ("a0+a1", 4096),
        ("a0", 1 << 20),
        ("a0+a1", 1 << 20),
    ]
    assert rows[0]["members"] == [] and rows[0]["ratio"] == 1
    both = rows[3]["members"]
    assert [m["interface"] for m in both] == ["a0", "a1"]
    assert all(40 < m["share"] < 60 for m in both)
    assert "a0 50 %, a1 50 %" in ran.stdout


HOSTS = """
ip link set lo up
unshare --net sleep 300 &
other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
nsenter --net=/proc/$other/ns/net ip link set lo up
for link in 0 1; do
  ip link add a$link type veth peer name b$link netns $other
  ip addr add 10.77.$link.1/24 dev a$link
  nsenter --net=/proc/$other/ns/net ip addr add 10.77.$link.2/24 dev b$link
  ip link set a$link up
  nsenter --net=/proc/$other/ns/net ip link set b$link up
done
nsenter --net=/proc/$other/ns/net "$@" --role server &
server=$!
"$@" --role worker --json "$OUT"
wait $server
"""


def test_two_hosts(tmp_path: Path) -> None:
    needs("unshare", "nsenter", "ip")
    out = tmp_path / "bond.json"
    options = "--interfaces a0,a1 --server-interfaces b0,b1 --sizes 4K,1M --rounds 2 --iters 5"
    where = "--scheduler 10.77.0.2:7000"
    command = [sys.executable, "-m", "fserver", "bench", "bond", *options.split(), *where.split()]
    alone = ["unshare", "--net", "bash", "-euc", HOSTS, "hosts"]
    env = {**os.environ, "OUT": str(out)}
    ran = subprocess.run([*alone, *command], capture_output=True, text=True, timeout=240, env=env)
    print(ran.stdout + ran.stderr)
    assert ran.returncode == 0
    rows = json.loads(out.read_text())["rows"]
    assert [r["over"] for r in rows] == ["a0", "a0+a1"] * 2
    assert [m["interface"] for m in rows[3]["members"]] == ["a0", "a1"]
    assert all(40 < m["share"] < 60 for m in rows[3]["members"])
    assert all(m["remote"].startswith(f"10.77.{i}.2:") for i, m in enumerate(rows[3]["members"]))


def test_settings() -> None:
    made = bond.PARSER
    options = made.parse_args("--devices n0,n1 --pairs 1,2 --lag 0,port1".split())
    found = bond.settings(options)
    assert [*found] == ["n0+n1 x 1", "n0+n1 x 2", "n0+n1 x 1, lag port1", "n0+n1 x 2, lag port1"]
    last = found["n0+n1 x 2, lag port1"]
    assert last["worker"] == last["server"]
    worker = last["worker"]
    assert worker["STEPAF_QP_NUM"] == "2" and worker["FSERVER_RDMA_DEVICE"] == "n0,n1"


def test_shares() -> None:
    def member(sent: int) -> dict[str, object]:
        return {"interface": "n0", "transport": "verbs/port2", "sent": sent}

    rounds = [(1, 2), (2, 4), (5, 8)]
    all_of = [[member(a), member(b)] for a, b in rounds]
    found = bond.shares([(all_of[0], all_of[1]), (all_of[1], all_of[2])])
    assert [m["sent"] for m in found] == [4, 6]
    assert bond.show(found) == "n0 40 % (port2), n0 60 % (port2)"
    assert bond.show([]) == "-"


@pytest.mark.parametrize("options", [[], ["--interfaces", "a", "--devices", "b"]])
def test_one_kind(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["bond", *options])
    assert "give either --interfaces (TCP) or --devices (RDMA)" in capsys.readouterr().err


def test_a_role_wants_a_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["bond", "--interfaces", "a0", "--role", "server"])
    assert "--scheduler and --role: give both, or neither" in capsys.readouterr().err


def test_no_such_interface(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["bond", "--interfaces", "nope0", "--rounds", "1"]) == 1
    assert "DMLC_INTERFACE=nope0: no such network interface" in capsys.readouterr().err
