"""A local tier on hosts that share nothing: each shard on its own host and on others.

CKPTD_HOSTS=large repeats everything at more moments; CKPTD_MOMENTS is how many hosts are lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from threading import Timer
from typing import Any

import pytest

from tests.hosts.bed import Bed
from tests.hosts.conftest import Site
from tests.hosts.services import STORE, start_s3
from tests.hosts.test_jobs import LARGE, Lines, ask, job, losses
from tests.support.forking import Fork
from tests.support.jobs import Job
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

TIER = "file:///mnt/ckpts"
HOSTS = "a b c d"
EVERY = 3
MOMENTS = int(os.environ.get("CKPTD_MOMENTS", "17" if LARGE else "1"))
"""For each layout and state of the remote store."""
PAIRS = int(os.environ.get("CKPTD_MOMENTS", "3"))
"""Moments at which two hosts are lost, of each kind."""
DISTURBED = int(os.environ.get("CKPTD_MOMENTS", "20"))
"""Moments of each disturbance."""
SEED = os.environ.get("CKPTD_SEED", "")
"""Another one gives other moments."""
MBIT, MBIT_OF_A_SLOW_STORE = 1000, 160
BOUND_S, WAIT_S = 60.0, 10.0
"""Of a save, and of training for it, also on a busy machine; a silent peer costs a save 10 s, and two of them 20."""
RANKS = 8 if LARGE else 4
RARELY: dict[str, Any] = {"replicate_every": 1000}
"""The first checkpoint of each job is replicated."""
large = pytest.mark.skipif(not LARGE, reason="CKPTD_HOSTS=large runs it")
Disturb = Callable[[], object]


@pytest.fixture(scope="module")
def four(namespaces: None) -> Iterator[Site]:
    with Bed([*"abcde", "s3"], mbit=MBIT, clocks={"b": 600.0}) as bed:
        yield Site(bed, start_s3(bed["s3"]), "")


@pytest.fixture(autouse=True)
def whole(four: Site) -> Iterator[None]:
    """What one test breaks does not break the next one."""
    yield
    for name in set("abcde") - four.bed.names:
        four.bed.start(name, empty=True)
    four.bed.join()


def tiered(site: Site, hosts: str, run: str, replicas: int = 1, ranks: int = 0, **options: Any) -> Job:
    settings = {"local": TIER, "replicas": replicas, **RARELY, **options.pop("settings", {})}
    return job(site, hosts, ranks or len(hosts.split()), run, settings=settings, **options)


def read(lines: Lines) -> dict[str, int]:
    """Bytes that all ranks read, by where."""
    found = [list(map(int, words[2:])) for words in lines if words[0] == "read"]
    assert found
    return dict(zip(("memory", "store", "local", "peer"), map(sum, zip(*found, strict=True)), strict=True))


@dataclass
class History:
    """A run through several jobs, each of which is killed; what it trained, and what it said it had saved."""

    site: Site
    run: str
    layout: str = "fsdp2"
    same: bool = True
    """Whether the number of ranks stays, and with it the losses."""
    newest: int = 0
    begun: int = 0
    """The newest save that may have begun."""
    losses: dict[str, str] = field(default_factory=dict)
    errors: str = ""
    resumed: int = 0
    """Where the newest job went on."""

    def train(
        self, hosts: str = HOSTS, steps: int = 2 * EVERY, then: Sequence[tuple[float, Disturb]] = (), **options: Any
    ) -> Lines:
        """Train this number of steps more, then do all that follows, each the given seconds later. Kill the job.

        It went on from the newest checkpoint, with the losses that it had before.
        """
        with tiered(self.site, hosts, self.run, layout=self.layout, every=EVERY, **options) as running:
            lines = running.until(self.newest + steps, len(running.ranks))
            left = [*then, (0.0, running.kill)]

            def go_on() -> None:
                left.pop(0)[1]()
                if left:
                    Timer(left[0][0], go_on).start()

            Timer(left[0][0], go_on).start()
            lines += running.lines()
            self.errors = running.errors()
        assert not left, self.errors
        known, [resumed] = self.losses, [int(words[1]) for words in lines if words[0] == "resumed"]
        self.resumed = resumed
        assert self.newest <= resumed <= self.begun, (resumed, self.newest, self.begun, self.errors)
        found = losses(lines)
        both = found.keys() & known.keys()
        assert not self.same or {step: known[step] for step in both} == {step: found[step] for step in both}
        self.losses = {step: loss for step, loss in known.items() if int(step) <= resumed} | found
        self.newest = max([resumed, *(int(words[2]) for words in lines if words[0] == "saved")])
        self.begun = max(map(int, found)) // EVERY * EVERY
        return lines


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"] if LARGE else ["fsdp2"])
@pytest.mark.parametrize("remote", ["plain", "slow", "away"] if LARGE else ["away"])
def test_a_host_that_is_lost_with_its_disk_is_restored_from_its_neighbours(
    layout: str, remote: str, four: Site
) -> None:
    """In its place comes an empty host, with its name or with another one."""
    chance, bed, history = (
        random.Random(layout + remote + SEED),
        four.bed,
        History(four, f"lost-{layout}-{remote}", layout),
    )
    hosts, spare = HOSTS.split(), "e"
    options: dict[str, Any] = {"ranks": RANKS, "vocabulary": 20_000 if remote == "slow" else 33}
    if remote != "away":
        options["settings"] = {"replicate_every": 1}
    if remote == "slow":
        bed.limit("s3", MBIT_OF_A_SLOW_STORE)
    for moment in range(MOMENTS + 1):
        lost = chance.randrange(len(hosts))
        began, resumes = time.monotonic(), history.newest
        then = [(chance.random(), partial(bed.kill, hosts[lost]))] if moment < MOMENTS else []
        lines = history.train(" ".join(hosts), then=then, **options)
        assert not moment or read(lines)["store"] == 0, history.errors
        print(
            "moment",
            layout,
            remote,
            moment,
            hosts,
            hosts[lost],
            resumes,
            history.resumed,
            round(time.monotonic() - began, 1),
        )
        if then:
            bed.start(hosts[lost], empty=True)
            if chance.random() < 0.5:
                hosts[lost], spare = spare, hosts[lost]
        if remote == "away" and not moment:
            bed.part([*hosts, spare])
    bed.join()
    bed.limit("s3", MBIT)


def test_bytes_on_the_wire_are_those_of_the_copies(four: Site) -> None:
    settings = json.dumps({"local": TIER, "replicas": 1, **RARELY})
    machines = [four.bed[name] for name in "cd"]
    with Job("tests.hosts.wire", [STORE, "wire", settings, str(16 << 20)], 2, four.environment, machines) as running:
        sent: dict[str, list[tuple[int, int]]] = {}
        for kind, _, save, num_bytes, stored in running.lines():
            assert kind == "sent"
            sent.setdefault(save, []).append((int(num_bytes), int(stored)))
            if save == "0":
                four.bed.part("cd")  # what is sent to the remote store does not count
            if len(sent) == 7:
                break
    four.bed.join()
    shares = [sum(num_bytes for num_bytes, _ in both) / both[0][1] for both in sent.values() if len(both) == 2]
    assert 0.98 < median(shares[2:]) < 1.02, shares


def lose_two(history: History, two: Sequence[str], after_s: float, **options: Any) -> int:
    """Lose two neighbours with their disks, when a checkpoint is remote. The newest step that was local."""
    bed = history.site.bed

    def lose() -> None:
        for name in two:
            bed.kill(name)

    history.train(then=[(0.0, partial(until_remote, history)), (after_s, lose)], **options)
    saved, history.newest = history.newest, remote_step(history)
    for name in two:
        bed.start(name, empty=True)
    return saved


def until_remote(history: History) -> None:
    wait_until(lambda: remote_step(history), "the replica")


def remote_step(history: History) -> int:
    """The newest step in the remote store; 0 if there is none."""
    try:
        return int(ask(history.site, "e", "--store", STORE, "latest", history.run)["step"])
    except AssertionError:
        return 0


@large
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("remote", ["plain", "slow", "away"])
def test_two_neighbours_that_are_lost_cost_what_is_not_replicated(layout: str, remote: str, four: Site) -> None:
    """While the remote store is away the job does not start."""
    chance, bed, history = (
        random.Random("two" + layout + remote + SEED),
        four.bed,
        History(four, f"two-{layout}-{remote}", layout),
    )
    options: dict[str, Any] = {"ranks": RANKS, "vocabulary": 20_000 if remote == "slow" else 33}
    if remote == "slow":
        bed.limit("s3", MBIT_OF_A_SLOW_STORE)
    for moment in range(PAIRS):
        first = chance.randrange(4)
        two, began = sorted((HOSTS + " " + HOSTS).split()[first : first + 2]), time.monotonic()
        saved = lose_two(history, two, chance.random(), **options)
        lost = f"2 of the 4 hosts that had run {history.run!r} do not answer ({', '.join(two)}), with 1 replicas"
        if remote == "away":
            bed.part([*"abcde"])
            brief = {"retry_s": 5.0}
            with tiered(four, HOSTS, history.run, layout=layout, ranks=RANKS, settings=brief) as running:
                lines, errors = [*running.lines()], running.errors()
            assert not lines
            assert lost in errors
            assert "Wait for one of them, or for the remote store" in errors
            bed.join()
        lines = history.train(**options)
        assert read(lines)["store"] or history.resumed >= saved, "they had no shard that others did not have"
        assert lost in history.errors
        print("two", layout, remote, moment, two, saved, history.resumed, round(time.monotonic() - began, 1))
    bed.limit("s3", MBIT)


@large
def test_without_replicas_a_job_survives_a_restart_and_not_the_loss_of_a_host(four: Site) -> None:
    history = History(four, "none")
    history.train(replicas=0, then=[(0.0, partial(until_remote, history))])
    assert "survives restarts, not the loss of a host" in history.errors
    assert read(history.train(replicas=0, then=[(0.0, partial(four.bed.kill, "b"))]))["store"] == 0
    four.bed.start("b", empty=True)
    history.newest, history.begun = 0, remote_step(history)
    assert read(history.train(replicas=0))["store"]
    assert "1 of the 4 hosts that had run 'none' do not answer (b), with 0 replicas" in history.errors


@large
def test_other_hosts_in_another_order_continue_the_newest_state(four: Site) -> None:
    """A host that was away for a job comes back with an old folder, and decides from then on."""
    history, bed = History(four, "moved", same=False), four.bed
    history.train("a b c d")
    bed.kill("a")
    history.train("d c b")
    bed.start("a")
    history.train("a e c b d")
    history.train("e b")
    history.train("b e c d")


@large
def test_torchrun_goes_on_with_a_host_in_the_place_of_a_lost_one(four: Site) -> None:
    """Its processes on the other hosts stay; ranks begin again when the new host has joined."""
    bed = four.bed
    settings = {"local": TIER, "replicas": 1, **RARELY}
    options = {"store": STORE, "run": "elastic", "layout": "fsdp2", "every": EVERY, "settings": settings}
    # Else ranks of a new round find addresses of the one before in the store that torchrun shares with them.
    environment = {**four.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()

    def start(name: str) -> Fork:
        return bed[name].start(
            "torchrun", "--nnodes=3", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={bed['a'].address}:29400", "--rdzv-id=elastic",
            f"--local-addr={bed[name].address}", "-m", "tests.hosts.train", json.dumps(options),
            output=writer, environment=environment,
        )  # fmt: skip

    with open(reader) as output:
        words = (line.split() for line in output)

        def until(kind: str, least: int) -> Lines:
            found: Lines = []
            for line in words:
                found.append(line)
                if line[0] == kind and int(line[-2 if kind == "step" else 1]) >= least:
                    return found
            raise AssertionError(found)

        programs = [start(name) for name in "abc"]
        try:
            before = until("step", 3 * EVERY)
            bed.kill("c")
            programs.append(start("e"))
            before += until("resumed", 1)
            resumed, after = int(before.pop()[1]), until("step", 5 * EVERY)
        finally:
            for program in programs:
                program.send_signal(signal.SIGTERM)
            os.close(writer)
            for _ in words:  # a rank whose lines nobody reads does not end
                pass
            for program in programs:
                program.wait(DEADLINE_S)
    assert resumed >= max(int(line[2]) for line in before if line[0] == "saved")
    sources = read([*before, *after])
    assert sources["store"] == 0
    assert sources["peer"] > 0
    known, found = losses(before), losses(after)
    assert min(map(int, found)) == resumed + 1
    assert all(found[step] == known[step] for step in found.keys() & known.keys())


@large
def test_ckptctl_sees_what_all_hosts_have(four: Site) -> None:
    history, bed = History(four, "seen"), four.bed
    history.train(then=[(0.0, partial(until_remote, history))])
    bed.kill("c")
    ids = {found["id"] for found in ask(four, "d", "--store", TIER, "ls", "seen")}
    listed = ask(four, "d", "--store", STORE, "ls", "seen", "--local", TIER)
    assert {found["id"] for found in listed if "local" in found["tiers"]} == ids
    assert history.newest in {found["step"] for found in listed}
    assert ask(four, "d", "--store", STORE, "latest", "seen", "--local", TIER)["step"] >= history.newest
    newest = ask(four, "a", "--store", TIER, "latest", "seen")
    bed["a"].run("ckptctl", "--store", TIER, "verify", newest["id"], environment=four.environment)


@large
def test_two_runs_on_the_same_hosts(four: Site) -> None:
    one, other = History(four, "one"), History(four, "other")
    for _ in range(2):
        one.train(then=[(0.0, partial(other.train, "d a b c"))])


@large
def test_the_job_of_a_host_that_was_cut_off_changes_nothing(four: Site) -> None:
    """Its processes live, and begin to save, while the job goes on elsewhere."""
    history, bed, zombie = History(four, "zombie"), four.bed, "a"

    with tiered(four, HOSTS, "zombie", layout="fsdp2", every=EVERY) as running:
        lines = running.until(2 * EVERY, 4)
        bed.part(["b", "c", "d", "e", "s3"], [zombie])
        running.kill(1, 2, 3)
        history.newest = max(int(words[2]) for words in lines if words[0] == "saved")
        history.begun = history.newest + EVERY
        history.losses = losses(lines)
        history.train("e b c d")
        bed.join()
        history.train("e b c d")
    history.train(HOSTS)


def partition(site: Site, *groups: Sequence[str]) -> tuple[Disturb, Disturb]:
    return partial(site.bed.part, *groups), site.bed.join


def stopped(site: Site) -> tuple[Disturb, Disturb]:
    begin, end = (
        partial(site.bed["c"].call, "tests.hosts.probes:signal_agents", number)
        for number in (signal.SIGSTOP, signal.SIGCONT)
    )
    return begin, end


def killed(site: Site) -> tuple[Disturb, Disturb]:
    """The agent of the first host, too: saves fail until it is there again."""

    def kill() -> None:
        for name in "ac":
            site.bed[name].call("tests.hosts.probes:signal_agents", signal.SIGKILL)

    return kill, lambda: None


def slow(site: Site) -> tuple[Disturb, Disturb]:
    return partial(site.bed.limit, "c", 8), partial(site.bed.limit, "c", MBIT)


def full(site: Site) -> tuple[Disturb, Disturb]:
    shell = partial(site.bed["c"].run, "sh", "-c")
    return partial(shell, "cat /dev/zero > /mnt/ballast || true"), partial(shell, "rm -f /mnt/ballast")


def lies(site: Site) -> tuple[Disturb, Disturb]:
    return partial(site.bed["c"].call, "tests.hosts.probes:flip", "/mnt"), lambda: None


DISTURBANCES: dict[str, Callable[[Site], tuple[Disturb, Disturb]]] = {
    "one host": lambda site: partition(site, ["a", "b", "d", "s3"], ["c"]),
    "halves": lambda site: partition(site, ["a", "b", "s3"], ["c", "d"]),
    "slow": slow, "stopped": stopped, "full": full, "lies": lies, "killed": killed,
}  # fmt: skip


@large
@pytest.mark.parametrize("what", DISTURBANCES)
def test_what_disturbs_hosts_holds_up_no_training_and_restores_no_other_state(what: str, four: Site) -> None:
    chance, history = random.Random(what), History(four, what.replace(" ", "-"))
    options: Any = {"background": True, "pace_s": 0.1, "vocabulary": 100_000}
    history.train(**options)
    begin, end = DISTURBANCES[what](four)
    moments = [moment for _ in range(DISTURBED) for moment in ((chance.random(), begin), (4 * chance.random(), end))]
    lines = history.train(then=[*moments, (5.0, begin if what in ("lies", "killed") else end)], **options)
    saves = [float(words[3]) for words in lines if words[0] == "saved"]
    waited = [float(words[3]) for words in lines if words[0] == "waited"]
    assert saves
    assert max(saves) < BOUND_S, history.errors
    assert max(waited) < WAIT_S, history.errors
    history.train(**options)
