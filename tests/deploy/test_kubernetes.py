"""Kustomize and Helm render the same objects, which Kubernetes accepts and which fit the daemon."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate  # type: ignore[attr-defined]

from ckptd.pages.sessions import LIFETIME_S
from ckptd.settings import Settings, load
from ckptstore.stores import open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import check_command, invoke

DEPLOY = Path(__file__).parents[2] / "deploy"
K8S, CHART = DEPLOY / "k8s", DEPLOY / "helm" / "ckptd"
ON = {"enabled": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "overlays/aws": {"irsa": ON, "ingress": ON, "tls": ON, "serviceMonitor": ON},
    "overlays/one-node": {"volume": ON, "sqlite": ON},
}
EXAMPLES = sorted((K8S / "examples").glob("*.yaml"))
_HELM_ONLY = ("app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/")
_WITHOUT_SCHEMA = ("ServiceMonitor",)


def documents(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text) if found]


@cache
def kustomize(folder: str) -> list[dict[str, Any]]:
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(program[0]) is None:
        pytest.skip("no kustomize or kubectl: Debian 13 has the package kustomize")
    done = subprocess.run([*program, str(K8S / folder)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")  # nor a warning about what is deprecated
    return documents(done.stdout)


def helm(values: dict[str, Any], name: str = "ckptd") -> list[dict[str, Any]]:
    helm_python = pytest.importorskip("helm_python", reason="no helm-python-sdk: it has wheels for Linux on x86-64")
    with helm_python.Chart.load(CHART) as chart:
        rendered: dict[str, str] = chart.render(values, name=name, namespace="training")
    return [found for text in rendered.values() for found in documents(text)]


@dataclass(frozen=True)
class Rendered:
    variant: str
    objects: dict[str, list[dict[str, Any]]]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = self.objects[kind]
        return found

    @property
    def pod(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.one("Deployment")["spec"]["template"]["spec"]
        return spec

    @property
    def settings(self) -> Settings:
        """As the daemon reads them; fails for a name that it does not know."""
        given = environment(self.pod["containers"][0])
        own = {name.removeprefix("CKPTD_").lower(): text for name, text in given.items() if name.startswith("CKPTD_")}
        assert {name for name in own if name not in Settings.__dataclass_fields__} == set()
        return load(own, {}).settings


def environment(container: dict[str, Any]) -> dict[str, str]:
    names = [item["name"] for item in container["env"]]
    assert len(set(names)) == len(names)
    return {item["name"]: item["value"] for item in container["env"]}


@pytest.fixture(scope="module", params=[f"{tool} {variant}" for tool in ("kustomize", "helm") for variant in VARIANTS])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    tool, variant = request.param.split()
    objects: dict[str, list[dict[str, Any]]] = {}
    for found in kustomize(variant) if tool == "kustomize" else helm(VARIANTS[variant]):
        objects.setdefault(found["kind"], []).append(found)
    return Rendered(variant, objects)


def test_kubernetes_accepts_each_object(rendered: Rendered) -> None:
    for kind, found in rendered.objects.items():
        for each in found:
            if kind not in _WITHOUT_SCHEMA:
                validate(each, "1.31", strict=True)


def test_the_deployment_fits_the_daemon(rendered: Rendered) -> None:
    pod, settings = rendered.pod, rendered.settings
    (container,) = pod["containers"]
    assert settings.verify_hours == 24
    assert settings.scrub_bytes_per_second > 0, "a verification must not take all bandwidth"
    assert pod["terminationGracePeriodSeconds"] > settings.notice_seconds + settings.drain_seconds
    assert pod["enableServiceLinks"] is False  # a Service named ckptd sets CKPTD_PORT=tcp://...
    assert container["ports"][0]["containerPort"] == settings.port
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/livez", "liveness": "/livez", "readiness": "/readyz",
    }  # fmt: skip
    scheme = "HTTPS" if settings.tls_cert else "HTTP"
    assert {probe.get("scheme", "HTTP") for probe in probes.values()} == {scheme}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    paths = [settings.tls_cert, settings.tls_key, settings.store.removeprefix("file://")]
    for path in (path for path in paths if path.startswith("/")):
        assert any(path.startswith(mount) for mount in mounted.values()), path


def test_selectors_find_the_pods(rendered: Rendered) -> None:
    labels = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert rendered.one("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    assert rendered.one("Service")["spec"]["selector"].items() <= labels
    assert rendered.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    replicas = rendered.one("Deployment")["spec"]["replicas"]
    if budgets := rendered.objects.get("PodDisruptionBudget"):
        assert budgets[0]["spec"]["selector"]["matchLabels"].items() <= labels
        assert budgets[0]["spec"]["minAvailable"] < replicas
    else:
        assert (replicas, rendered.one("Deployment")["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_a_browser_stays_with_the_daemon_that_has_its_login(rendered: Rendered) -> None:
    service = rendered.one("Service")["spec"]
    assert service["sessionAffinity"] == "ClientIP"
    assert service["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"] == LIFETIME_S
    for ingress in rendered.objects.get("Ingress", []):
        told = {name.rpartition("/")[2]: text for name, text in ingress["metadata"]["annotations"].items()}
        assert (told["affinity"], int(told["session-cookie-max-age"])) == ("cookie", LIFETIME_S)
        assert told.get("backend-protocol", "HTTP") == ("HTTPS" if rendered.settings.tls_cert else "HTTP")
        assert rendered.settings.connections_per_client == 0


def test_the_network_policy_permits_what_is_needed(rendered: Rendered) -> None:
    policy = rendered.one("NetworkPolicy")["spec"]
    leaving = {(each["port"], each.get("protocol", "TCP")) for rule in policy["egress"] for each in rule["ports"]}
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]
    seaweedfs = int(compose["ckptd"]["environment"]["FSSPEC_S3_ENDPOINT_URL"].rpartition(":")[2])
    minio, otlp, postgresql = 9000, 4318, 5432
    tcp = (53, 443, seaweedfs, minio, otlp, postgresql)
    assert leaving == {(53, "UDP"), *((port, "TCP") for port in tcp)}
    (arriving,) = policy["ingress"]
    namespaces = [
        each["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for each in arriving["from"]
        if "namespaceSelector" in each
    ]
    assert namespaces == ["monitoring", *(["ingress-nginx"] if "Ingress" in rendered.objects else [])]
    (clients,) = [each["podSelector"]["matchLabels"] for each in arriving["from"] if "podSelector" in each]
    for pod in example_pods():
        assert clients.items() <= pod["metadata"]["labels"].items()


def test_the_monitor_finds_the_service(rendered: Rendered) -> None:
    for monitor in rendered.objects.get("ServiceMonitor", []):
        service = rendered.one("Service")
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        assert endpoint["path"] == "/metrics"
        assert endpoint.get("scheme") == ("https" if rendered.settings.tls_cert else None)
        assert endpoint["authorization"]["credentials"].keys() == {"name", "key"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomize_and_helm_render_the_same(variant: str) -> None:
    both = (kustomize(variant), helm(VARIANTS[variant]))
    ours, theirs = ({_identity(found): _comparable(found) for found in each} for each in both)
    assert ours == theirs


def _identity(found: dict[str, Any]) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def _comparable(value: Any) -> Any:
    """Without the labels that only Helm adds, without defaults, and with lists of named things in order."""
    if isinstance(value, dict):
        found = {name: _comparable(each) for name, each in value.items() if not name.startswith(_HELM_ONLY)}
        defaults = {"scheme": "HTTP", "nginx.ingress.kubernetes.io/backend-protocol": "HTTP"}
        return {name: each for name, each in found.items() if each != {} and defaults.get(name) != each}
    if isinstance(value, list):
        return sorted((_comparable(each) for each in value), key=partial(json.dumps, sort_keys=True))
    return value


def test_the_chart_has_no_complaints_and_refuses_unknown_values() -> None:
    helm_python = pytest.importorskip("helm_python", reason="no helm-python-sdk: it has wheels for Linux on x86-64")
    for values in VARIANTS.values():
        report = helm_python.lint(CHART, values, strict=True)
        assert [each for each in report["messages"] if each["severity"] > 1] + report["errors"] == []
    for wrong in ({"replica": 3}, {"store": "checkpoints"}, {"settings": {"CKPTD_VERIFY_HOURS": 24}}):
        with pytest.raises(helm_python.HelmValuesError, match=next(iter(wrong))):
            helm(wrong)


def test_two_releases_of_the_chart_share_nothing() -> None:
    one, other = ({_identity(found) for found in helm({"sqlite": ON}, name)} for name in ("one", "other"))
    assert len(one) == len(other) == 4
    assert not one & other


def example_pods() -> Iterator[dict[str, Any]]:
    for path in EXAMPLES:
        for found in documents(path.read_text()):
            if "template" in found["spec"]:
                yield found["spec"]["template"]


def test_kubernetes_accepts_the_examples() -> None:
    for path in EXAMPLES:
        for found in documents(path.read_text()):
            validate(found, "1.31", strict=True)


def test_the_examples_call_our_programs_with_options_that_exist() -> None:
    checked = []
    for pod in example_pods():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
            for words in ([*container.get("command", []), *container.get("args", [])], hook.get("command", [])):
                if words:
                    check_command(words)
                    checked.append(words[:2])
    assert ["ckptctl", "export"] in checked
    assert ["ckptctl", "drain"] in checked
    assert ["ckpt-run", "--grace"] in checked
    with pytest.raises(Exception, match=r"No such option.*--timeuot"):
        check_command(["ckptctl", "drain", "--timeuot", "3"])


def test_the_grace_period_of_the_job_is_planned() -> None:
    text = (K8S / "examples" / "training-job.yaml").read_text()
    said = re.search(r"The (\d+) seconds of: (ckptctl plan .*)$", text, re.MULTILINE)
    assert said is not None
    planned = invoke(*shlex.split(said[2])[1:], "-o", "json").json["termination_grace_period_s"]
    assert planned == int(said[1])
    (pod,) = [each["spec"] for each in example_pods() if "subdomain" in each["spec"]]
    (trainer,) = pod["containers"]
    hook = trainer["lifecycle"]["preStop"]["exec"]["command"]
    assert planned + float(hook[-1]) < pod["terminationGracePeriodSeconds"]
    assert float(trainer["command"][2]) < pod["terminationGracePeriodSeconds"]


def test_the_init_container_fetches_the_weights(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    write_checkpoint(open_store(store), "gpt-small", step=1)
    (fetch,) = [each["spec"]["initContainers"][0] for each in example_pods() if "initContainers" in each["spec"]]
    file = tmp_path / "model.safetensors"
    words = [word.replace("/weights/model.safetensors", str(file)) for word in fetch["command"][1:]]
    for _ in range(2):  # the second try replaces the file of the first
        assert invoke(*words, env={"CKPT_STORE": store}).code in (0, 3)
        assert file.stat().st_size > 0
