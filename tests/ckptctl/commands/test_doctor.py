from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from ckptapi import bodies
from ckptapi.bodies import Scope, TokenRequest
from ckptapi.client import DaemonClient
from ckptstore import names
from ckptstore.stores import open_store
from tests.support.command_line import invoke, succeed
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until


def test_jobs_are_listed_shown_waited_for_and_ended(daemon: Daemon) -> None:
    at = ("--url", daemon.url)
    assert invoke("jobs", *at).stdout == ""
    with daemon.client() as client:
        job = client.start_job(bodies.VerifyJob(run="gpt"))
    shown = succeed("jobs", job.id, "--wait", *at).stdout
    assert ("succeeded" in shown, "gpt@40" in shown) == (True, True)
    listed = invoke("jobs", *at).stdout
    assert (job.id in listed, "verify" in listed) == (True, True)
    assert invoke("jobs", *at, "-o", "id").stdout.split() == [job.id]
    assert invoke("jobs", job.id, *at, "-o", "json").json["result"]["num_corrupt"] == 0
    assert invoke("jobs", job.id, "--cancel", *at, "-o", "json").json["state"] == "succeeded"
    for args, code in ((("01M7Y6P7WGCXV53EY39EPJ6JT8",), 4), (("../x",), 2), (("--cancel",), 2)):
        assert invoke("jobs", *args, *at).code == code


def test_a_probe_through_the_daemon_and_of_the_store(daemon: Daemon, folder: Path) -> None:
    for target in (("--url", daemon.url), ("--store", folder)):
        shown = succeed("probe", *target).stdout
        assert "one winner" in shown
        row = next(line for line in shown.splitlines() if "passes" in line)
        assert ("a hard link" in row, "3 of 3" in row) == (True, True), "the columns of docs/how-to/stores.md"
        body = invoke("probe", *target, "-o", "json").json
        assert (body["ok"], body["conditional_writes"]) == (True, True)
        assert (body["create_only"], body["races"]) == ("a hard link", "3 of 3")
    # A pass of the daemon's retention probes the store, too.
    wait_until(lambda: not list(open_store(str(folder)).list(names.PROBES_PREFIX)), "nothing is left of the probes")


def test_the_doctor_finds_everything_in_its_place(daemon: Daemon, folder: Path) -> None:
    through = succeed("doctor", "--url", daemon.url, "-o", "json")
    checks = {finding["check"]: finding["verdict"] for finding in through.json}
    assert set(checks.values()) == {"ok"}
    assert {"configuration", "daemon's database", "versions", "clocks", "store: one winner", "runs"} <= set(checks)
    assert "2 runs" in succeed("doctor", "--store", folder).stdout


def test_the_doctor_reports_what_is_wrong(daemon: Daemon, folder: Path) -> None:
    folder.rename(folder.with_name("unmounted"))
    wait_until(lambda: daemon.get("/readyz").status_code == 503, "the daemon's notice")
    done = invoke("doctor", "--url", daemon.url, "-o", "json")
    assert done.code == 1
    wrong = [f["check"] for f in done.json if f["verdict"] == "wrong"]
    assert wrong == ["daemon's view of the store"]
    assert "store" in [f["check"] for f in done.json if f["verdict"] == "skipped"]
    assert done.error["code"] == "unhealthy"
    gone = invoke("doctor", "--url", "http://127.0.0.1:9", "-o", "json")
    assert gone.code == 1
    verdicts = {finding["check"]: finding["verdict"] for finding in gone.json}
    assert verdicts == {
        "configuration": "ok", "daemon": "wrong", "versions": "skipped", "store": "skipped", "runs": "skipped",
    }  # fmt: skip
    assert gone.error["message"].startswith("daemon: ckptd at http://127.0.0.1:9 did not respond")


def test_the_doctor_needs_no_admin_to_be_content(folder: Path) -> None:
    with running_daemon(folder.as_uri(), environment={**os.environ, "CKPTD_TOKEN": "secret of an admin"}) as daemon:
        with closing(DaemonClient(daemon.url, "secret of an admin")) as admin:
            reader = admin.create_token(TokenRequest(name="reader", scopes=[Scope.READ])).secret
        done = invoke("doctor", "--url", daemon.url, "--token", reader, "-o", "json")
    assert done.code == 0, done.stdout + done.stderr
    found = {finding["check"]: (finding["verdict"], finding["found"]) for finding in done.json}
    assert (found["store"], found["runs"][0]) == (("skipped", "not checked: needs scope admin"), "ok")
