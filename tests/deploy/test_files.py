from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import crossplane
import grafana_foundation_sdk.cog.plugins as grafana_plugins
import promql_parser
import pytest
import trustme
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard

from ckptd.app import create_app
from ckptd.settings import KNOBS, Settings
from ckptstore.stores import open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import present, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "ckptd.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
ENVIRONMENT = {f"CKPTD_{knob.name.upper()}": knob for knob in KNOBS}
_METRIC = re.compile(r"\bckptd_[a-z0-9_]+")


def test_compose_accepts_its_file() -> None:
    text = re.sub(r"\$\{\w+:\?[^}]*\}", "x", (ROOT / "docker-compose.yml").read_text())
    compose_spec.PyCompose.from_yaml(text).to_spec()
    services = yaml.safe_load(text)["services"]
    for name in ("ckptd", "bucket", "scrape-token"):
        own = {variable for variable in services[name]["environment"] if variable.startswith("CKPTD_")}
        assert own <= ENVIRONMENT.keys()
    assert services["ckptd"]["environment"]["CKPTD_VERIFY_HOURS"] == "24"
    assert all(service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"} for service in services.values())
    unwatched = {name for name, service in services.items() if "healthcheck" not in service}
    assert unwatched == {"ckptd", "bucket", "scrape-token"}, "one is watched by its image, two end at once"
    mounted = [volume for service in services.values() for volume in service.get("volumes", [])]
    local = [volume.split(":")[0] for volume in mounted if volume.startswith("./")]
    assert local
    assert [path for path in local if not (ROOT / path).exists()] == []


def test_the_image_has_no_torch_and_no_root() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    assert "[torch" not in lines
    assert "s3,gcs,azure" in lines, "the libraries of every cloud"
    assert [int(number) > 0 for number in re.findall(r"^USER (\d+)$", lines, re.MULTILINE)] == [True]
    assert set(re.findall(r"CKPTD_\w+", lines)) <= ENVIRONMENT.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    defaults = dict(re.findall(r"^ARG (\w+)=(.+)$", lines, re.MULTILINE))
    assert defaults["VERSION"] == project["version"]
    assert f"Programming Language :: Python :: {defaults['PYTHON']}" in project["classifiers"]
    assert re.findall(r"^FROM (\S+)", lines, re.MULTILINE) == ["${BASE}"] * 2
    assert {f'"${{{name}}}"' for name in ("VERSION", "REVISION", "BASE")} <= set(re.findall(r'"\$\{\w+\}"', lines))


def test_the_health_check_knows_tls(tmp_path: Path) -> None:
    found = present(re.search(r"^ +CMD (\[\"python\".*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    command, pem = [sys.executable, *json.loads(found[1])[1:]], tmp_path / "daemon.pem"
    certificate = trustme.CA().issue_cert("ckptd.example.com")  # without 127.0.0.1
    pem.write_bytes(certificate.private_key_and_cert_chain_pem.bytes())

    def healthy(port: int, tls: dict[str, str]) -> bool:
        environment = {**os.environ, "CKPTD_PORT": str(port), **tls}
        return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 0

    (tmp_path / "store").mkdir()
    for options, tls in (((), {}), (("--tls-cert", str(pem), "--tls-key", str(pem)), {"CKPTD_TLS_CERT": str(pem)})):
        with running_daemon(str(tmp_path / "store"), options=options, ready=False) as daemon:
            port = int(daemon.url.rpartition(":")[2])
            wait_until(lambda port=port, tls=tls: healthy(port, tls), "a healthy daemon")  # type: ignore[misc]
        assert not healthy(port, tls)


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all series that a daemon with a checkpoint has."""
    folder = tmp_path_factory.mktemp("metrics")
    app = create_app(Settings(store=str(folder / "store"), db=f"sqlite:///{folder}/index.db", auth="off"))
    context = app.state.context
    checkpoint = write_checkpoint(open_store(str(folder / "store")), step=1)
    context.store_sync.notify(checkpoint.run, checkpoint.attempt)
    names: set[str] = set()
    for family in context.metrics.registry.collect():
        names |= {family.name, *(sample.name for sample in family.samples)}
        if family.type == "counter":
            names.add(f"{family.name}_total")
        if family.type == "histogram":
            names |= {f"{family.name}_{end}" for end in ("bucket", "sum", "count")}
    return names


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of alerts and dashboard, with its place."""
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$run", ".*")


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_every_expression_parses_and_names_metrics_that_exist(place: str, expression: str, metrics: set[str]) -> None:
    promql_parser.parse(expression)
    named = set(_METRIC.findall(expression))
    assert named or "up{" in expression
    assert named <= metrics


def test_every_metric_is_explained(metrics: set[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    explained = set(_METRIC.findall(page))
    assert {name for name in explained if name not in metrics} == set()
    families = {re.sub("_(bucket|sum|count|created|total)$", "", name) for name in metrics}
    assert {name for name in families if not any(text.startswith(name) for text in explained)} == set()


def test_alerts_state_the_problem_and_the_remedy() -> None:
    for rule in ALERTS["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_dashboard_is_complete_and_nothing_overlaps() -> None:
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= DASHBOARD.keys()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == DASHBOARD["templating"]["list"][0]["query"]


def test_nginx_reads_its_file() -> None:
    parsed = crossplane.parse(str(DEPLOY / "nginx" / "ckptd.conf"), check_ctx=False, check_args=True)  # type: ignore[no-untyped-call]
    assert (parsed["status"], parsed["errors"]) == ("ok", [])
    (server,) = [block for block in parsed["config"][0]["parsed"] if block["directive"] == "server"]
    (location, _) = [block for block in server["block"] if block["directive"] == "location"]
    told = [line["args"] for line in location["block"] if line["directive"] == "proxy_set_header"]
    assert dict(told)["X-Forwarded-For"] == "$remote_addr"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: make browser installs it")
def test_prometheus_accepts_config_and_rules_and_the_rules_pass_their_tests(tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("/etc/scrape/token", str(config)))
    for arguments in (("check", "config", "prometheus.yml"), ("test", "rules", "alerts.test.yml")):
        done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt-get install systemd")
@pytest.mark.parametrize("name", ["ckptd.service", "ckptd-agent.service"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / name).read_text()
    assert "agent" in name or "CKPTD_VERIFY_HOURS=24" in unit
    assert set(re.findall(r"CKPTD_\w+", unit)) <= ENVIRONMENT.keys()
    file = tmp_path / "ckptd.service"
    file.write_text(unit.replace("/opt/ckptd/bin/ckptd", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=60)
    assert [line for line in done.stderr.splitlines() if "ckptd.service" in line] == []
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(file)]
    rated = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert rated.returncode == 0, rated.stdout


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    grafana_plugins.register_default_plugins()
    understood = json.loads(JSONEncoder(sort_keys=True).encode(GrafanaDashboard.from_json(DASHBOARD)))
    assert _lost(DASHBOARD, understood) == []
    misspelt = {**DASHBOARD, "panels": [{**panel, "gridpos": 1} for panel in DASHBOARD["panels"]]}
    lost = _lost(misspelt, json.loads(JSONEncoder().encode(GrafanaDashboard.from_json(misspelt))))
    assert len(lost) == len(DASHBOARD["panels"])


def _lost(given: Any, understood: Any, path: str = "") -> list[str]:
    """Where Grafana's own model of a dashboard, written out again, has not what was given."""
    if isinstance(given, dict) and isinstance(understood, dict):
        return [lost for name in given for lost in _lost(given[name], understood.get(name), f"{path}/{name}")]
    if isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        pairs = enumerate(zip(given, understood, strict=True))
        return [lost for i, (ours, theirs) in pairs for lost in _lost(ours, theirs, f"{path}/{i}")]
    return [] if given == understood else [path]
