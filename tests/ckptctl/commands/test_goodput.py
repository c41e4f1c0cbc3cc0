from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ckptstore.analysis.goodput import BADPUT, Spent
from ckptstore.format.parsing import seal
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.histories import History
from tests.support.waiting import wait_until


def _write(store: Store, name: str) -> History:
    run, history = Run(store, name), History(3)
    for heartbeat in history.heartbeats(run):
        store.put(run.keys.heartbeat(heartbeat.id), seal(heartbeat))
    return history


def test_the_account_of_a_run(folder: Path, filled: Store) -> None:
    history = _write(filled, "sim")
    found = invoke("goodput", "sim", "--store", folder, "-o", "json").json
    total = sum(found["seconds"].values())
    for kind, seconds in history.truth().items():
        assert found["seconds"][kind] == pytest.approx(seconds, abs=0.02 * total)
    assert found["goodput"] == pytest.approx(found["seconds"]["productive"] / total)
    assert set(found["badput"]) == set(BADPUT.values())
    table = succeed("goodput", "sim", "--store", folder)
    for kind in Spent:
        assert kind in table.stdout
    assert len(invoke("goodput", "sim", "--store", folder, "-o", "id").stdout.split()) == len(history.lives)
    assert "* without heartbeats" in succeed("goodput", "gpt", "--store", folder).stdout


def test_openmetrics_can_be_parsed(folder: Path, filled: Store) -> None:
    _write(filled, "sim")
    text = invoke("goodput", "sim", "--openmetrics", "--store", folder).stdout
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert set(families) == {"ckptd_goodput_seconds", "ckptd_goodput_ratio", "ckptd_lost_steps"}
    assert {sample.labels["category"] for sample in families["ckptd_goodput_seconds"].samples} == set(Spent)


def test_through_a_daemon_and_in_its_metrics(folder: Path, filled: Store) -> None:
    _write(filled, "gpt")
    with running_daemon(f"file://{folder}") as daemon:
        found = succeed("goodput", "gpt", "--url", daemon.url, "-o", "json")
        assert found.json["goodput"] == invoke("goodput", "gpt", "--store", folder, "-o", "json").json["goodput"]
        wait_until(lambda: 'ckptd_goodput_ratio{run="gpt"}' in daemon.get("/metrics").text, "the account")
        assert 'ckptd_goodput_seconds{category="lost",run="gpt"}' in daemon.get("/metrics").text
        assert invoke("goodput", "nope", "--url", daemon.url).code == 4
