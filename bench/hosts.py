"""A local tier on hosts that share nothing: restores by source, what replicas cost, restarts in place under torchrun.

Hosts are namespaces of this machine, each with a disk of its own (tmpfs) and a network of 0.5 GB/s, and so is the
object store (tests/hosts/bed.py). They share its cores. A model that FSDP2 shards over three hosts is restored from the
memory of the savers, the hosts' own disks, a neighbour (one host is new), or the store (all are new). DCP reads the
same tensors from the store, and from a folder of this machine that all hosts see, which no network limits. Saves
without and with a replica take turns in one job. Restarts: seconds from SIGKILL of a rank to the next step
of all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from bench.hosts_rank import BYTES_PER_LAYER
from bench.measuring import Spread, forget_cached, in_turns, sync_tree
from bench.report import Goal, Report
from tests.hosts.bed import Bed
from tests.hosts.machine import refusal
from tests.hosts.services import STORE, start_s3
from tests.support.forking import ROOT, TRAINER, Fork
from tests.support.ports import free_port

MBIT = 4000
BYTES_PER_S = MBIT / 8 * 1e6
JOB, REPLACED, NEW = ("a", "b", "c"), ("a", "d", "c"), ("e", "f", "g")
"""The hosts of the job; one of them is new; all are."""
RUN = "bench"
IMPORTS = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
SIZES = {True: (30e6, 2, 1), False: (200e6, 3, 2)}
"""By quick: bytes of the state, repetitions, and those of restarts."""
WAYS = ("memory", "disk", "peer", "remote", "dcp, shared folder", "dcp, S3")
_SOURCES = {"memory": "memory", "disk": "local", "peer": "peer", "remote": "store"}
_STEPS = 6
_END_S = 300.0
_LOOK_S = 0.05


@dataclass
class Site:
    """The hosts, and the saved state."""

    bed: Bed
    s3: Mapping[str, str]
    shared: Path
    """A folder that all hosts see."""
    layers: int
    digests: list[str] = field(default_factory=list)
    stored_bytes: int = 0
    held: list[str] = field(default_factory=list)
    """Runs of which savers held the newest checkpoint in memory."""

    def task(self, **more: Any) -> str:
        """For bench.hosts_rank."""
        return json.dumps({"layers": self.layers, "store": STORE, "run": RUN, "replicas": 1, **more})

    @contextmanager
    def ranks(self, hosts: Sequence[str], what: str, task: str) -> Iterator[tuple[list[Fork], Any]]:
        """A rank on each host, and the file to which the first one writes. They are killed at the end."""
        place = {"MASTER_ADDR": self.bed[hosts[0]].address, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        place |= {"WORLD_SIZE": str(len(hosts)), **self.s3}
        reader, writer = os.pipe()
        ranks = [
            self.bed[host].fork(
                "bench.hosts_rank", [what, task], stdout=writer, stderr=2,
                environment={**os.environ, **place, "RANK": str(rank)},
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        os.close(writer)
        with open(reader) as output:
            try:
                yield ranks, output
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait(_END_S)

    def run(self, hosts: Sequence[str], what: str, task: str) -> dict[str, Any]:
        """The result of a job that ends."""
        with self.ranks(hosts, what, task) as (ranks, output):
            found = _result(output)
            if any(rank.wait(_END_S) for rank in ranks):
                raise RuntimeError(f"a rank of {what} failed; see above")
        return found

    def replace(self, *names: str) -> None:
        """New hosts with these names, with empty disks."""
        for name in names:
            self.bed.kill(name)
        for name in names:
            self.bed.start(name, empty=True)

    def restored(self, way: str) -> float:
        """Seconds of one restore. Raises RuntimeError if another state came back, or from elsewhere."""
        if way in ("peer", "remote"):
            self.replace(*({"d"} if way == "peer" else NEW))
        hosts = {"peer": REPLACED, "remote": NEW}.get(way, JOB)
        run = f"memory-{len(self.held)}" if way == "memory" else RUN
        if way == "memory":  # a job that restores for training frees it
            self.held.append(run)
            with self.ranks(JOB, "save", self.task(run=run, retain_s=3600.0)) as (_, output):
                _result(output)
        found = self.run(hosts, "restore", self.task(seed=2, run=run))
        self._check(found["digests"])
        wanted, reader = _SOURCES[way], 1 if way == "peer" else 0
        read = found["read"][reader]
        if read.get(wanted, 0) < 0.9 * self.stored_bytes / len(JOB):
            raise RuntimeError(f"read {read} instead of {wanted}")
        return float(found["seconds"])

    def restored_by_dcp(self, path: str) -> float:
        """The same, of the peer."""
        if "://" not in path:
            forget_cached(Path(path))
        found = self.run(JOB, "dcp-restore", self.task(seed=2, path=path))
        self._check(found["digests"])
        return float(found["seconds"])

    def _check(self, digests: Sequence[str]) -> None:
        if digests != self.digests:
            raise RuntimeError("the restored state differs from the saved one")


def measure(quick: bool) -> Report:
    """As root; SystemExit says why not where this machine has no hosts."""
    if (reason := refusal()) is not None:
        raise SystemExit(reason)
    num_bytes, repetitions, restart_repetitions = SIZES[quick]
    layers = max(3, round(num_bytes / BYTES_PER_LAYER))
    with ExitStack() as stack:
        # The usual temporary folder is a different one on each host.
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".ckptd-bench-", dir=ROOT)))
        names = [*JOB, "d", *NEW, "s3"]
        bed = stack.enter_context(Bed(names, mbit=MBIT, imports=(*TRAINER, *IMPORTS), disk_bytes=4 << 30))
        site = Site(bed, start_s3(bed["s3"]), shared, layers)
        with site.ranks(JOB, "save", site.task()) as (_, output):
            saved = _result(output)
        site.digests, site.stored_bytes = saved["digests"], saved["stored_bytes"]
        ways: dict[str, Callable[[], float]] = {way: partial(site.restored, way) for way in _SOURCES}
        for name, path in zip(WAYS[len(ways) :], (str(shared / "dcp"), f"{STORE}-dcp/one"), strict=True):
            site.run(JOB, "dcp-save", site.task(path=path))
            ways[name] = partial(site.restored_by_dcp, path)
        sync_tree(shared)
        seconds, problems = in_turns(ways, repetitions)
        site.replace(*JOB)
        with site.ranks(JOB, "pairs", site.task(repetitions=repetitions, steps=_STEPS)) as (_, output):
            paired = _result(output)
            agents = [site.bed[host].call("tests.hosts.probes:agents_memory") for host in JOB]
        again = restarts(site, restart_repetitions)
    return _report(site, seconds, problems, paired, again, max(agents))


def restarts(site: Site, repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds from the loss of a rank until all ranks have restored, and have made a step; by source.

    One job, which torchrun restarts again and again: from memory, and from disk, where the savers are killed, too.
    Raises RuntimeError if a restart did not read from there.
    """
    site.replace(*JOB)
    found: dict[str, list[tuple[float, float]]] = {"memory": [], "disk": []}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=site.shared)))
        task = site.task(log=str(logs), run="restarts")
        output = stack.enter_context(open(logs / "torchrun.txt", "w+"))
        programs = {host: _torchrun(site, host, task, output) for host in JOB}
        stack.callback(_kill, programs)
        began = 0.0
        for way in (way for way in found for _ in range(repetitions)):
            _wait_for(lambda since=began: all(_saved_since(logs, rank, since) for rank in range(len(JOB))), output)  # type: ignore[misc]
            processes = [[line for line in _lines(logs, rank) if "pid" in line][-1] for rank in range(len(JOB))]
            began = time.monotonic()
            if way != "memory":
                for host, process in zip(JOB, processes, strict=True):
                    site.bed[host].run("kill", "-9", str(process["saver"]))
            site.bed["b"].run("kill", "-9", str(processes[1]["pid"]))
            _wait_for(lambda since=began: all(_again(logs, rank, since) for rank in range(len(JOB))), output)  # type: ignore[misc]
            again = [one for rank in range(len(JOB)) if (one := _again(logs, rank, began))]
            read = [one["read"] for one, _ in again]
            if not any(one.get(_SOURCES[way]) for one in read):
                raise RuntimeError(f"read {read} instead of {way}")
            found[way].append((max(one["at"] for one, _ in again) - began, max(one["at"] for _, one in again) - began))
    return found


def _torchrun(site: Site, host: str, task: str, output: IO[str]) -> Fork:
    command = [
        "torchrun", f"--nnodes={len(JOB)}", "--nproc-per-node=1", "--max-restarts=100", "--monitor-interval=0.1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={site.bed[JOB[0]].address}:29400", "--rdzv-id=bench",
        f"--local-addr={site.bed[host].address}", "-m", "bench.hosts_rank", "train", task,
    ]  # fmt: skip
    # Else ranks of a new round find addresses of the one before in the store that torchrun shares with them.
    environment = {**site.s3, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return site.bed[host].start(*command, output=output.fileno(), environment=environment)


def _kill(programs: Mapping[str, Fork]) -> None:
    """SIGTERM: torchrun ends its ranks."""
    for program in programs.values():
        program.send_signal(signal.SIGTERM)
    for program in programs.values():
        with suppress(subprocess.TimeoutExpired):
            program.wait(30.0)
        program.kill()
        program.wait(_END_S)


def _lines(logs: Path, rank: int) -> list[dict[str, Any]]:
    path = logs / f"{rank}.log"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _saved_since(logs: Path, rank: int, began: float) -> bool:
    """Whether the job of after this time has saved twice: the newest save is on the hosts only."""
    return len([line for line in _lines(logs, rank) if "saved" in line and line["at"] > began]) > 1


def _again(logs: Path, rank: int, began: float) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The restore of a rank after this time, and its first step."""
    lines = _lines(logs, rank)
    restored = [at for at, line in enumerate(lines) if "restored" in line and line["at"] > began]
    after = lines[restored[-1] :] if restored else []
    steps = [line for line in after if "step" in line]
    return (after[0], steps[0]) if steps else None


def _wait_for(reached: Callable[[], bool], output: IO[str]) -> None:
    until = time.monotonic() + _END_S
    while not reached():
        if time.monotonic() > until:
            output.seek(0)
            raise RuntimeError(f"the job does not go on: {output.read()[-2000:]}")
        time.sleep(_LOOK_S)


def _result(output: IO[str]) -> dict[str, Any]:
    line = output.readline()
    if not line:
        raise RuntimeError("the ranks ended without a result; see above")
    found: dict[str, Any] = json.loads(line)
    return found


def _report(
    site: Site,
    seconds: Mapping[str, list[float]],
    problems: Mapping[str, str],
    paired: Mapping[str, list[float]],
    again: Mapping[str, list[tuple[float, float]]],
    agent_bytes: int,
) -> Report:
    middle = {way: median(seconds[way]) if way in seconds else float("nan") for way in WAYS}
    wire_s = site.stored_bytes / len(JOB) / BYTES_PER_S
    of = {name: median(values) for name, values in paired.items()}
    lost_s = median(b - a for a, b in zip(paired["lost_s-0"], paired["lost_s-1"], strict=True))
    alone_s = _STEPS * of["step_s-0"] + of["lost_s-0"]
    shown = {f"restore, {way}": found for way, found in seconds.items()}
    for replicas in (0, 1):
        shown[f"durable, {replicas} replicas"] = paired[f"durable_s-{replicas}"]
        shown[f"a save beside {_STEPS} steps costs, {replicas} replicas"] = paired[f"lost_s-{replicas}"]
    shown |= {f"kill to next step, {way}": [step_s for _, step_s in found] for way, found in again.items()}
    facts = {f"{way}, seconds": middle[way] for way in WAYS}
    facts |= {name.replace("-", ", replicas "): value for name, value in of.items()}
    facts["memory of an agent"] = agent_bytes
    for way, found in again.items():
        facts[f"{way}, kill to restored"] = median(restored_s for restored_s, _ in found)
        facts[f"{way}, kill to next step"] = median(step_s for _, step_s in found)
    folder, wire = "dcp, shared folder", of["wire_bytes-1"] / of["stored_bytes-1"]
    durable = of["durable_s-1"] / (of["durable_s-0"] + wire_s)
    return Report(
        bench="hosts",
        what=f"{site.stored_bytes / 1e9:.2f} GB on {len(JOB)} hosts of one machine, {BYTES_PER_S / 1e9:g} GB/s each",
        columns=("", "seconds, median (quartiles)"),
        rows=[(name, str(Spread.of(found))) for name, found in shown.items()],
        goals=[
            *(Goal(way, folder, middle[way] / middle[folder], 1.0, "at most") for way in _SOURCES),
            Goal("remote", "stored bytes / 0.5 GB/s", middle["remote"] / wire_s / len(JOB), 1.5, "at most"),
            Goal("bytes on the wire", "replicas x unique bytes", wire, 1.02, "at most"),
            Goal("durable, 1 replica", "no replica + shard / 0.5 GB/s", durable, 1.1, "at most"),
            Goal("steps beside a save, 1 replica", "no replica", (alone_s + lost_s) / alone_s, 1.1, "at most"),
            Goal("memory of an agent", "256 MiB", agent_bytes / (256 << 20), 1.0, "at most"),
        ],
        limit=wire_s,
        peers={way: middle[way] for way in WAYS if way.startswith("dcp")},
        problems=problems,
        state_bytes=site.stored_bytes,
        facts=facts,
    )
