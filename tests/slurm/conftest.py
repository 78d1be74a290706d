"""Slurm on this machine alone: munged, slurmctld and slurmd on loopback, as one node.

Nothing is installed; needed are Debian's ``slurm-wlm`` and ``munge``. All files and ports are the
session's own, so a cluster that this machine belongs to is not touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Makes ``studies`` importable: tests are no packages here.
sys.path.insert(0, str(Path(__file__).parent))

DAEMONS = ("munged", "slurmctld", "slurmd")
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

CONF = """\
ClusterName=labkit
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
ReturnToService=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
{node} NodeAddr=127.0.0.1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """What the same study says on this machine, its cells one after the other."""
    from studies import command, own_environment, tables

    folder = tmp_path_factory.mktemp("local")
    environ = {**os.environ, **own_environment(folder)}
    subprocess.run(
        command("out=study"), cwd=folder, env=environ, check=True, capture_output=True, text=True
    )
    return tables(folder / "study")


def daemon_path(name: str) -> str:
    """Return a daemon's path; skip where there is none."""
    path = shutil.which(name, path=PLACES)
    if path is None:
        pytest.skip(f"no {name} here: apt-get install slurm-wlm munge")
    return path


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Start the daemons; give the environment in which Slurm's commands find them."""
    munged, slurmctld, slurmd = map(daemon_path, DAEMONS)
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for parent in folder.parents[:2]:
        parent.chmod(0o755)  # munge refuses a socket below a closed folder
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PLACES}
    node = subprocess.run([slurmd, "-C"], capture_output=True, text=True).stdout.splitlines()[0]
    user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    host = node.split()[0].removeprefix("NodeName=")
    ports = free_ports(2)
    conf = CONF.format(host=host, user=user, ports=ports, folder=folder, node=node)
    (folder / "slurm.conf").write_text(conf)
    commands = [
        [
            munged,
            "--foreground",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        ],
        [slurmctld, "-D"],
        [slurmd, "-D"],
    ]
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{Path(command[0]).name}.out", "wb") as out:
                daemons.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
            time.sleep(1)
        wait_for(lambda: node_state(environ) == "idle", 60, folder)
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def node_state(environ) -> str:
    """Return what the cluster says of its node."""
    command = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout.strip()


def wait_for(holds, seconds: float, folder: Path) -> None:
    """Wait until something holds; tell what the folder's logs say if it never does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            logs = [*folder.glob("*.log"), *folder.glob("*.out")]
            output = "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
            pytest.fail(f"not within {seconds} s:\n{output}")
        time.sleep(0.2)
