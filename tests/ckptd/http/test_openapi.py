"""Every endpoint against its own description: no server error, and only answers that the document promises."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ckptapi import bodies
from ckptd.http.access import RULES
from ckptstore.stores import open_store
from tests.support.checkpoints import sample_arrays, write_checkpoint
from tests.support.daemons import Daemon, running_daemon

EXAMPLES = int(os.environ.get("CKPTD_CONTRACT_EXAMPLES", "8"))
"""Requests for each endpoint."""
_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
_WITHOUT_BODY = (bodies.REINDEX, bodies.PROBE, bodies.CHECKPOINTS + "/{id}/pins/{name}")
_LIMITS = {"wait": 0.01, "limit": 50}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder: Path = tmp_path_factory.mktemp("contract")
    store = open_store(str(folder / "store"))
    for step in (1, 2, 3):
        write_checkpoint(store, "gpt", step, {"model/scalar": sample_arrays()["model/scalar"]}, {"loss": 1.0})
    with running_daemon(store.url) as running:
        yield running


@pytest.fixture(scope="module")
def document(daemon: Daemon) -> dict[str, Any]:
    """The OpenAPI document, with times to wait and sizes of pages as short as a test wants them."""
    found: dict[str, Any] = daemon.get("/openapi.json").json()
    for path in found["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in _LIMITS:
                    parameter["schema"]["maximum"] = _LIMITS[parameter["name"]]
    return found


def test_every_endpoint_keeps_to_its_description(daemon: Daemon, document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    failures: list[str] = []
    num_cases = 0
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
        )
        def call(case: Case[Any]) -> None:
            nonlocal num_cases
            num_cases += 1
            response = case.call(base_url=daemon.url, timeout=60)
            case.validate_response(response, checks=_CHECKS)

        try:
            call()
        except (Exception, FailureGroup) as error:
            failures.append(f"{operation.label}: {error} {getattr(error, 'exceptions', '')}")
    assert not failures, "\n\n".join(failures)
    assert num_cases > 5 * len(document["paths"])
    assert "Traceback" not in daemon.log()
    assert daemon.get("/readyz").status_code == 200


def test_the_document_is_complete(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert {row for row in RULES if row[1].startswith("/v1")} <= described
    lacking = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            if not path.startswith(("/v1", "/checkpoints")):
                continue
            errors = [status for status in responses if status >= "400"]
            explained = all("application/problem+json" in responses[status].get("content", {}) for status in errors)
            body_missing = method in ("post", "put") and "requestBody" not in operation and path not in _WITHOUT_BODY
            if not ({"401", "403", "422", "429", "500", "503"} <= set(errors) and explained) or body_missing:
                lacking.append(f"{method} {path}")
            assert operation["description"], path
    assert lacking == []
