from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptstore.stores import Store
from tests.conftest import S3Location
from tests.support.daemons import running_daemon
from tests.support.forking import TRAINER, run


@pytest.mark.parametrize("store", ["local", "s3"], indirect=True)
def test_every_reader_has_the_models_that_were_saved(
    store: Store, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of five kinds, raw and coded; the newest checkpoint of one of them has NaN."""
    remote: S3Location | None = request.getfixturevalue("s3_store") if store.url.startswith("s3") else None
    environment = remote.environment if remote else dict(os.environ)
    with running_daemon(store.url, environment=environment) as daemon:
        client = {"HF_ENDPOINT": f"{daemon.url}/hf", "HF_TOKEN": "any", "HF_HOME": str(tmp_path / "cache")}
        patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_ETAG_TIMEOUT": "60"}  # not 10 s: tests share the cores
        environment |= {**client, **patient, "OMP_NUM_THREADS": "1"}
        program = "tests.ckpt.integrations.read_hub"
        _, printed, errors = run(TRAINER, program, [store.url, str(tmp_path)], end_s=500.0, environment=environment)
    assert printed.splitlines()[-1:] == ["as saved 5"], printed + errors
