"""Checkpoints that need chunks of earlier ones, through a daemon."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CheckpointHeld
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.support.checkpoints import Arrays, write_checkpoint
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon


def chain(folder: Path) -> list[Checkpoint]:
    """A checkpoint, and two that reference its larger chunk."""
    store = open_store(str(folder))
    found: list[Checkpoint] = []
    for step in (1, 2, 3):
        arrays: Arrays = {"model/frozen": np.arange(50_000, dtype=np.int64), "model/step": np.array(step, np.int32)}
        found.append(write_checkpoint(store, "gpt", step, arrays, base=found[-1].attempt if found else None))
    return found


def test_a_daemon_serves_and_keeps_what_is_referenced(tmp_path: Path) -> None:
    first, second, third = chain(tmp_path)
    with running_daemon(f"file://{tmp_path}") as daemon, daemon.client() as client:
        listed = client.checkpoints("gpt")
        assert listed == StoreSource(open_store(str(tmp_path))).checkpoints("gpt")
        assert [c.referenced_bytes for c in listed] == [third.referenced_bytes, second.referenced_bytes, 0]
        assert all(verify(client, checkpoint).ok for checkpoint in listed)
        with pytest.raises(CheckpointHeld, match=f"referenced:{third.id}"):
            client.delete(first, 0.0)
        client.delete(second, 0.0)
        assert verify(client, third).ok
        shown = invoke("show", third.id, "--url", daemon.url)
        assert shown.code == 0
        assert first.id in shown.stdout
        assert "referenced" in shown.stdout
        (shard,) = invoke("show", third.id, "--url", daemon.url, "-o", "json").json["shards"]
        assert (shard["stored_bytes"], shard["referenced_bytes"]) == (third.stored_bytes, third.referenced_bytes)
        client.delete(third, 0.0, force=True)
        client.delete(first, 0.0, force=True)
        assert client.checkpoints("gpt") == []
