"""The examples under Slurm: a Slurm of one node, if its programs are installed (Debian: slurmctld,
slurmd, slurm-client, munge), and a stand-in for srun that sets the same variables."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/ringx"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo")
LIMIT = 120.0
"""Seconds for a job."""

CONF = """
ClusterName=ringx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge/socket
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/linear
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""

SRUN = """#!/bin/bash
# Two tasks on this host.
[[ $1 = --* ]] && shift
export SLURM_NTASKS=2 SLURM_STEP_NODELIST=nodes SLURM_JOB_ID={job}
for SLURM_PROCID in 0 1; do
  export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID
  "$@" & tasks+=($!)
done
for task in "${{tasks[@]}}"; do
  wait -n || {{ failed=1; kill "${{tasks[@]}}" 2>/dev/null; }} # --kill-on-bad-exit
done
exit ${{failed:-0}}
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm of this host alone."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"no Slurm of one's own: {missing or 'not root'}")
    for name in ("munge", "state", "spool"):
        (tmp_path / name).mkdir(mode=0o700)
    key = tmp_path / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host, conf = socket.gethostname().split(".")[0], tmp_path / "slurm.conf"
    conf.write_text(CONF.format(host=host, at=tmp_path, ports=free_ports(2)))
    env = {**os.environ, "SLURM_CONF": str(conf)}
    at = tmp_path / "munge"
    files = [f"--{name}-file={at}/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "-F", "--force", f"--socket={at}/socket", *files],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", host],
    ]
    started = []
    try:
        for daemon in daemons:
            out = (tmp_path / f"{daemon[0]}.out").open("w")
            started.append(subprocess.Popen(daemon, env=env, stdout=out, stderr=out))
            time.sleep(1)
        for _ in range(60):
            done = subprocess.run(["sinfo", "-h"], env=env, capture_output=True, text=True)
            if " idle " in done.stdout:
                break
            time.sleep(0.5)
        else:
            pytest.fail("\n".join(file.read_text() for file in tmp_path.glob("*.out")))
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(10)


def options(name: str) -> list[str]:
    if name == "vit":
        pytest.importorskip("sklearn", reason="no scikit-learn: pip install scikit-learn")
    return [f"{name}.sbatch", "--steps", "2"]


def with_python(env: dict[str, str]) -> dict[str, str]:
    search = os.pathsep.join(filter(None, (str(EXAMPLES.parents[1]), os.getenv("PYTHONPATH"))))
    return {**env, "PYTHON": sys.executable, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_batch_of_slurm(name: str, slurm: dict[str, str], tmp_path: Path):
    out = tmp_path / "job.out"
    command = ["sbatch", "--wait", "--ntasks-per-node", "2", "--output", str(out), *options(name)]
    done = subprocess.run(
        command, cwd=EXAMPLES, env=with_python(slurm), capture_output=True, text=True, timeout=LIMIT
    )
    text = out.read_text() if out.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert "losses equal" in text and "world size 2" in text


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_stand_in(name: str, tmp_path: Path):
    """The variables are those that Slurm sets; the first node is asked of scontrol."""
    scripts = {"srun": SRUN.format(job=free_ports(1)[0] - 20000), "scontrol": "#!/bin/sh\n"}
    scripts["scontrol"] += 'test "$*" = "show hostnames nodes" && echo 127.0.0.1 && echo other\n'
    for program, text in scripts.items():
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    env = with_python({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    env |= {"SLURM_SUBMIT_DIR": str(EXAMPLES)}
    done = subprocess.run(
        ["bash", *options(name)], cwd=EXAMPLES, env=env, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses equal" in done.stdout and "world size 2" in done.stdout


def test_without_slurm():
    env = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    command = ["./setup_dist_vars.sh", "true"]
    done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True)
    assert done.returncode and "SLURM_PROCID: is not set: start this with srun" in done.stderr
