from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptapi import bodies
from ckptapi.bodies import Scope, TokenRequest
from ckptapi.client import DaemonClient
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.stores import open_store
from ckptstore.stores.checks import run_store_checks
from tests.support.command_line import invoke, succeed
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import Faults, FaultyStore
from tests.support.waiting import wait_until


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DaemonClient]:
    with daemon.client() as made:
        yield made


def test_jobs_are_listed_shown_waited_for_and_ended(daemon: Daemon, client: DaemonClient) -> None:
    assert invoke("jobs", "--url", daemon.url).stdout == ""
    job = client.start_job(bodies.VerifyJob(run="gpt"))
    shown = succeed("jobs", job.id, "--wait", "--url", daemon.url)
    assert "succeeded" in shown.stdout
    assert "gpt@40" in shown.stdout
    listed = invoke("jobs", "--url", daemon.url)
    assert job.id in listed.stdout
    assert "verify" in listed.stdout
    assert invoke("jobs", "--url", daemon.url, "-o", "id").stdout.split() == [job.id]
    assert json.loads(invoke("jobs", job.id, "--url", daemon.url, "-o", "json").stdout)["result"]["num_corrupt"] == 0
    again = invoke("jobs", job.id, "--cancel", "--url", daemon.url, "-o", "json")
    assert json.loads(again.stdout)["state"] == "succeeded"


def test_what_makes_no_sense_of_jobs(daemon: Daemon, folder: Path) -> None:
    for args, code in ((("01M7Y6P7WGCXV53EY39EPJ6JT8",), 4), (("../x",), 2), (("--cancel",), 2)):
        assert invoke("jobs", *args, "--url", daemon.url).code == code


def test_a_probe_through_the_daemon_and_of_the_store(daemon: Daemon, folder: Path) -> None:
    for target in (("--url", daemon.url), ("--store", folder)):
        assert "one winner" in succeed("probe", *target).stdout
        body = json.loads(invoke("probe", *target, "-o", "json").stdout)
        assert (body["ok"], body["conditional_writes"]) == (True, True)
    assert list(open_store(str(folder)).list(names.PROBES_PREFIX)) == []


class Overwriting(FaultyStore):
    """Accepts the condition and overwrites, as some servers do."""

    def put_if_absent(self, key: str, data: bytes) -> bool:  # type: ignore[override]
        self.put(key, data)
        return True


def test_a_store_that_lies_about_conditions_is_found_out(folder: Path) -> None:
    found = run_store_checks(Overwriting(open_store(str(folder)), Faults()), system_clock)
    assert [check.name for check in found.checks if not check.ok] == ["create once", "one winner"]
    assert not found.conditional_writes
    assert not found.ok


def test_a_clock_that_is_off_is_found_out(folder: Path) -> None:
    found = run_store_checks(open_store(str(folder)), lambda: system_clock() + 500)
    assert [check.name for check in found.checks if not check.ok] == ["clock"]
    assert found.clock_skew_s == pytest.approx(-500, abs=60)


def test_the_doctor_finds_everything_in_its_place(daemon: Daemon, folder: Path) -> None:
    through = succeed("doctor", "--url", daemon.url, "-o", "json")
    checks = {finding["check"]: finding["verdict"] for finding in json.loads(through.stdout)}
    assert set(checks.values()) == {"ok"}
    assert {"configuration", "daemon's database", "versions", "clocks", "store: one winner", "runs"} <= set(checks)
    assert "2 runs" in succeed("doctor", "--store", folder).stdout


def test_the_doctor_reports_what_is_wrong(daemon: Daemon, folder: Path) -> None:
    folder.rename(folder.with_name("unmounted"))
    wait_until(lambda: daemon.get("/readyz").status_code == 503, "the daemon's notice")
    done = invoke("doctor", "--url", daemon.url, "-o", "json")
    assert done.code == 1
    wrong = [f["check"] for f in json.loads(done.stdout) if f["verdict"] == "wrong"]
    assert wrong == ["daemon's view of the store"]
    assert "store" in [f["check"] for f in json.loads(done.stdout) if f["verdict"] == "skipped"]
    assert json.loads(done.stderr)["code"] == "unhealthy"
    gone = invoke("doctor", "--url", "http://127.0.0.1:9", "-o", "json")
    assert gone.code == 1
    verdicts = {finding["check"]: finding["verdict"] for finding in json.loads(gone.stdout)}
    assert verdicts == {
        "configuration": "ok", "daemon": "wrong", "versions": "skipped", "store": "skipped", "runs": "skipped",
    }  # fmt: skip
    assert json.loads(gone.stderr)["message"].startswith("daemon: ckptd at http://127.0.0.1:9 did not respond")


def test_the_doctor_needs_no_admin_to_be_content(folder: Path) -> None:
    with running_daemon(folder.as_uri(), environment={**os.environ, "CKPTD_TOKEN": "secret of an admin"}) as daemon:
        with closing(DaemonClient(daemon.url, "secret of an admin")) as admin:
            reader = admin.create_token(TokenRequest(name="reader", scopes=[Scope.READ])).secret
        done = invoke("doctor", "--url", daemon.url, "--token", reader, "-o", "json")
    assert done.code == 0, done.stdout + done.stderr
    found = {finding["check"]: (finding["verdict"], finding["found"]) for finding in json.loads(done.stdout)}
    assert (found["store"], found["runs"][0]) == (("skipped", "not checked: needs scope admin"), "ok")
