"""Jobs on several hosts that share nothing but an object store, and whose clocks differ by minutes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from ckpt.saver.launcher import EXIT_SAVED
from tests.hosts.conftest import Site
from tests.hosts.services import STORE, TOKEN
from tests.support.jobs import Job
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

TRAIN = "tests.hosts.train"
LARGE = os.environ.get("CKPTD_HOSTS") == "large"
Lines = list[list[str]]


def job(site: Site, hosts: str, ranks: int, run: str, store: str = STORE, **options: Any) -> Job:
    """Ranks on hosts, which divide them equally."""
    arguments = json.dumps({"store": store, "run": run, **options})
    return Job(TRAIN, [arguments], ranks, site.environment, [site.bed[name] for name in hosts.split()])


def ask(site: Site, host: str, *command: str) -> Any:
    """What ckptctl says on a host, about the store or this host."""
    return json.loads(site.bed[host].run("ckptctl", "-o", "json", "--quiet", *command, environment=site.environment))


def losses(lines: Lines) -> dict[str, str]:
    """Of rank 0, by step."""
    return {words[2]: words[3] for words in lines if words[:2] == ["step", "0"]}


def check_continued(first: Lines, second: Lines, step: int) -> None:
    """A job went on from a step, with the losses that it had before."""
    assert ["resumed", str(step)] in second
    both = losses(first).keys() & losses(second).keys()
    assert both
    assert {step: losses(first)[step] for step in both} == {step: losses(second)[step] for step in both}


@pytest.mark.parametrize(("layout", "ranks"), [("pp", 2), *([("ddp", 2), ("fsdp2", 8)] if LARGE else [])])
def test_a_job_that_lost_a_host_and_its_disk_goes_on_with_another_one(layout: str, ranks: int, site: Site) -> None:
    with job(site, "b a", ranks, layout, layout=layout) as running:
        first = running.until(6, ranks)
        drained = ask(site, "a", "drain", layout, "--timeout", "60")
        site.bed.kill("b")
    site.bed.start("b", empty=True)
    with job(site, "a spare", ranks, layout, layout=layout, steps=8) as running:
        second = running.finish()
    check_continued(first, second, 4)
    assert (drained["durable"], drained["savers"]) == (True, ranks // 2), "the savers of its host"


@pytest.mark.parametrize("by", ["host", "daemon"])
def test_notice_of_preemption_from_elsewhere_saves_the_last_step(by: str, site: Site) -> None:
    """The clock there is behind: by the clock of rank 0 the deadline is over."""
    run, settings = f"noticed-by-{by}", {"daemon": site.daemon, "token": TOKEN}
    with job(site, "b a", 2, run, grace_s=60.0, pace_s=0.05, steps=1000, settings=settings) as running:
        next(words for words in running.lines() if words[:2] == ["saved", "0"])
        if by == "daemon":
            site.bed["desk"].call("tests.hosts.services:preempt", site.daemon, run)
        else:
            running.ranks[1].send_signal(signal.SIGTERM)
        ends = {int(words[2]) for words in running.lines() if words[0] == "end"}
        codes, errors = [rank.wait(DEADLINE_S) for rank in running.ranks], running.errors()
    assert codes == [EXIT_SAVED] * 2, errors
    assert ends == {ask(site, "desk", "--store", STORE, "latest", run)["step"]}


@pytest.mark.parametrize("tier", ["store", "local"])
def test_a_folder_that_hosts_do_not_share_is_refused_and_the_host_named(tier: str, site: Site) -> None:
    """Otherwise the first save waits half an hour for shards on another disk."""
    where: Any = {"store": "file:///mnt/ckpts"} if tier == "store" else {"settings": {"local": "file:///mnt/ckpts"}}
    with job(site, "a b", 2, "apart", every=1, **where) as running:
        assert ["saved", "0", "1"] not in running.lines()
        errors = running.errors()
    assert "rank 1 on b saves to another folder than rank 0 on a, here to file:///mnt/ckpts" in errors
