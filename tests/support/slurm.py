"""A Slurm cluster of this host: munged, slurmctld and slurmd as ordinary processes of the caller."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo", "squeue")
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_JOBS_S = 600.0
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def is_missing() -> list[str]:
    """The programs that are not installed: Debian has them in slurmctld, slurmd, slurm-client and munge."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of the clients of a cluster that has as many CPUs as this host. folder: a short path."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(
        _CONF.format(
            host=host, user=getpass.getuser(), folder=folder, controller=free_port(), node=free_port(),
            cpus=os.cpu_count(),
        )
    )  # fmt: skip
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(conf)}
    munge = [
        f"--{name}={folder}/munge.{suffix}"
        for name, suffix in (
            ("key-file", "key"),
            ("socket", "sock"),
            ("pid-file", "pid"),
            ("log-file", "log"),
            ("seed-file", "seed"),
        )
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", host],
        ):
            with (folder / f"{command[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        wait_until(lambda: b"idle" in _asked(environment, "sinfo", "-h", "-o", "%T"), "an idle node of Slurm")
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)


def wait_for_jobs(environment: dict[str, str]) -> None:
    """Return when no job is queued or running."""
    wait_until(lambda: not _asked(environment, "squeue", "-h").strip(), "the end of all jobs of Slurm", _JOBS_S)


def _asked(environment: dict[str, str], *command: str) -> bytes:
    return subprocess.run(command, env=environment, capture_output=True).stdout
