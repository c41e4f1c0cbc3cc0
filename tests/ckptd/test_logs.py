from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ckptapi import bodies
from ckptstore.stores import Store
from tests.conftest import S3Location
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.forking import DAEMON, run
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY
from tests.support.waiting import wait_until

_TOKEN = "correct horse battery staple"


def test_logs_are_json_with_the_ids_of_requests(store: Store) -> None:
    write_checkpoint(store, step=1)
    environment = {**os.environ, "CKPTD_TOKEN": _TOKEN}
    with running_daemon(store.url, options=("--log-format", "json"), environment=environment, ready=False) as daemon:
        headers = {"Authorization": f"Bearer {_TOKEN}"}

        def ask(id: str, path: str = "/checkpoints/latest") -> str:
            return daemon.get(path, headers={**headers, "X-Request-ID": id}).headers["x-request-id"]

        wait_until(lambda: daemon.get("/readyz").status_code == 200, "readiness")
        assert ask("job-7.rank_3") == "job-7.rank_3"
        for bad in ("x" * 65, "a b", 'a"b', "", "a%0ab"):
            assert re.fullmatch("[0-9a-f]{32}", ask(bad)), bad
        missing = daemon.get("/checkpoints/latest?run=none", headers={**headers, "X-Request-ID": "ask-none"})
        assert missing.json()["request_id"] == "ask-none"
        wait_until(lambda: "ask-none" in daemon.log(), "the log line")
        lines = [json.loads(line) for line in daemon.log().splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "request_id", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    found = next(line for line in lines if line["request_id"] == "job-7.rank_3")
    assert found["message"].startswith("GET /checkpoints/latest 200")
    assert (found["status"], found["caller"], found["path"]) == (200, "bootstrap", "/checkpoints/latest")
    assert found["seconds"] > 0
    assert next(line for line in lines if line["request_id"] == "ask-none")["status"] == 404


def test_secrets_are_in_no_log(s3_store: S3Location, tmp_path: Path) -> None:
    """A session with everything that could slip out: tokens, keys of the store, a password in a URL, failures."""
    environment = {**s3_store.environment, "CKPTD_TOKEN": _TOKEN, "CKPTD_LOG_LEVEL": "debug"}
    seen = [_TOKEN, SECRET_KEY]
    logs = []
    for form in ("text", "json"):
        with running_daemon(s3_store.url, options=("--log-format", form), environment=environment) as daemon:
            headers = {"Authorization": f"Bearer {_TOKEN}"}
            made = daemon.post(bodies.TOKENS, {"name": f"t-{form}", "scopes": ["read"]}, headers=headers).json()[
                "secret"
            ]
            seen += [made, made.rpartition("_")[2]]
            daemon.get(bodies.RUNS, headers={"Authorization": f"Bearer {made}"})
            daemon.get(f"/v1/checkpoints/{made}", headers={"Authorization": f"Bearer {made}x"})
            daemon.get(f"/checkpoints/latest?token={made}", headers={"Authorization": f"Bearer {made}"})
            daemon.post(bodies.TOKENS, {"name": made, "scopes": ["read"]}, headers=headers)
            logs.append(daemon.log())
    failing = {**environment, "AWS_SECRET_ACCESS_KEY": "wrong secret of the test", "CKPTD_TOKEN": _TOKEN}
    with running_daemon(s3_store.url, environment=failing, ready=False) as daemon:
        wait_until(lambda: "store" in daemon.log() and "cannot" in daemon.log(), "a failure of the store")
        logs.append(daemon.log() + daemon.get("/readyz").text)
    url = "ftp://me:hidden-word@127.0.0.1:9/folder"
    command = ["serve", "--store", url, "--db", f"sqlite:///{tmp_path}/i.db"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    code, printed, errors = run(DAEMON, "ckptd", command, environment=clean)
    assert code != 0
    logs.append(printed + errors)
    seen += ["wrong secret of the test", "hidden-word"]
    assert ACCESS_KEY != SECRET_KEY
    assert all(len(log) > 50 for log in logs)
    assert [secret for secret in seen for log in logs if secret in log] == []
