from __future__ import annotations

import inspect
from dataclasses import replace

import msgspec
import pytest

from ckptapi import bodies
from ckptapi.bodies import CheckpointBody
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.format.decoding import decode_json
from ckptstore.names import Attempt
from ckptstore.retention.pruning import Prune

STRUCTS = [
    body
    for body in (Prune, *vars(bodies).values())
    if inspect.isclass(body)
    and issubclass(body, msgspec.Struct)
    and body.__module__ in (bodies.__name__, Prune.__module__)
]
CHECKPOINT = Checkpoint(
    run="gpt", attempt=Attempt(1200, "01HF7YAT00ABCDEFGHJKMNPQRS"), state=State.COMMITTED, committed_at=2.5,
    created_at=1.0, world_size=8, raw_bytes=4096, stored_bytes=1024, referenced_bytes=512, num_entries=3,
    num_shards=8, manifest_digest="a" * 32, manifest_bytes=77, metrics={"loss": 0.25}, tags={"kind": "best"},
    problem="shard 3 is missing",
)  # fmt: skip


def test_a_checkpoint_is_the_same_after_a_round_trip() -> None:
    sent = msgspec.json.encode(CheckpointBody.of(CHECKPOINT))
    assert decode_json(sent, CheckpointBody).checkpoint() == CHECKPOINT
    parent = Attempt(300, CHECKPOINT.attempt.ulid, generation=2)
    left = replace(CHECKPOINT, attempt=replace(CHECKPOINT.attempt, generation=3), abandoned_at=9.5, parent=parent)
    found = decode_json(msgspec.json.encode(CheckpointBody.of(left)), CheckpointBody).checkpoint()
    assert (found, found.abandoned_at, found.parent) == (left, 9.5, parent)


def test_names_agree_and_fields_of_a_later_version_are_ignored() -> None:
    body = CheckpointBody.of(CHECKPOINT)
    assert body.id == f"gpt@1200.{CHECKPOINT.attempt.ulid}" == CHECKPOINT.id
    assert (body.step, body.save_seconds) == (1200, 1.5)
    fields = msgspec.json.decode(msgspec.json.encode(body))
    assert decode_json(msgspec.json.encode({**fields, "later": [1]}), CheckpointBody).checkpoint() == CHECKPOINT


@pytest.mark.parametrize("body", STRUCTS, ids=lambda body: body.__name__)
def test_bodies_cannot_be_changed(body: type[msgspec.Struct]) -> None:
    assert body.__struct_config__.frozen
