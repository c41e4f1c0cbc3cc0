from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from aiobotocore.signers import AioRequestSigner
from torch import nn

from ckpt import Checkpointer
from ckptstore.errors import StoreReadOnly
from ckptstore.stores import Store, open_store
from tests.support import seaweed
from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.seaweed import S3Service
from tests.support.waiting import present

POLICIES = Path(__file__).parents[2] / "deploy" / "aws"
_ACTIONS = {
    "ListObjectsV2": "s3:ListBucket", "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "GetObject": "s3:GetObject", "HeadObject": "s3:GetObject", "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject", "UploadPart": "s3:PutObject", "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload", "DeleteObject": "s3:DeleteObject",
}  # fmt: skip
"""What AWS asks for, by kind of request."""


def policy(role: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((POLICIES / f"{role}.json").read_text())["Statement"]
    return found


def actions(role: str) -> set[str]:
    return {action for statement in policy(role) for action in statement["Action"]}


@dataclass
class Bucket:
    """A bucket under the policies, and what was requested of it."""

    service: S3Service
    name: str
    requests: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"s3://{self.name}/team"

    def options(self, role: str) -> dict[str, Any]:
        return seaweed.as_role(self.service, role)

    def store(self, role: str) -> Store:
        return open_store(self.url, self.options(role))

    def checkpointer(self) -> Checkpointer:
        """A trainer's, with its saver in threads of this process, where its requests are recorded."""
        return Checkpointer(self.url, run="gpt", options=self.options("trainer"), compress="off", writer="thread")

    def used(self) -> set[str]:
        """Actions of all requests since the last call. Fails for a kind of request that no policy names."""
        requests, self.requests = self.requests, set()
        return {_ACTIONS[request] for request in requests}


@pytest.fixture
def bucket(s3_service: S3Service, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    found = Bucket(s3_service, f"policies-{uuid.uuid4().hex[:12]}")
    renamed = {
        role: json.loads(json.dumps(policy(role)).replace(":::checkpoints", f":::{found.name}"))
        for role in seaweed.ROLES
    }
    seaweed.grant(s3_service, found.name, renamed)
    sign: Any = AioRequestSigner.sign

    async def record(self: AioRequestSigner, operation_name: str, *args: Any, **options: Any) -> Any:
        found.requests.add(operation_name)
        return await sign(self, operation_name, *args, **options)

    monkeypatch.setattr(AioRequestSigner, "sign", record)  # every request is signed, those of our own connections too
    return found


def fill(bucket: Bucket) -> nn.Linear:
    """Two checkpoints of 16 MiB, in two parts each."""
    model = nn.Linear(4096, 1024, bias=False)
    with bucket.checkpointer() as checkpointer:
        assert checkpointer.restore(model) is None
        for step in (1, 2):
            nn.init.normal_(model.weight)
            checkpointer.save(model, None, step)
    return model


def begin_upload(store: Store) -> Any:
    writer = store.open_writer("gpt/attempts/broken/shard-00000.ckpt")
    writer.write(bytes(9 << 20))
    return writer


def test_a_trainer_saves_and_restores(bucket: Bucket) -> None:
    model = fill(bucket)
    saved = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    with bucket.checkpointer() as checkpointer:
        assert present(checkpointer.restore(model)).step == 2
    assert torch.equal(model.weight, saved)
    begin_upload(bucket.store("trainer")).abort()
    assert bucket.used() == actions("trainer")


def test_a_trainer_deletes_no_part_of_a_checkpoint(bucket: Bucket) -> None:
    fill(bucket)
    store = bucket.store("trainer")
    before = [info.key for folder in ("commits", "attempts") for info in store.list(f"gpt/{folder}/")]
    assert before
    for key in before:
        with pytest.raises(StoreReadOnly, match="Access Denied"):
            store.delete_many([key])
    assert [info.key for folder in ("commits", "attempts") for info in store.list(f"gpt/{folder}/")] == before


def test_a_deletion_that_the_store_denies_is_not_allowed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bucket)
    monkeypatch.setitem(fsspec.config.conf, "s3", bucket.options("reader"))
    done = invoke("rm", "gpt@1", "--yes", "--store", bucket.url, "-o", "json")
    assert (done.code, done.error["code"]) == (8, "store_read_only")
    assert invoke("ls", "gpt", "--store", bucket.url, "-o", "json").json[-1]["step"] == 1


def test_an_operator_and_a_daemon_do_their_work(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bucket)
    bucket.used()
    monkeypatch.setitem(fsspec.config.conf, "s3", bucket.options("operator"))
    copy = f"s3://{bucket.name}/copy"
    for words in (
        ("probe",), ("scrub", "gpt"), ("verify", "gpt", "--ranks", "2"), ("cp", "gpt@2", "--to", copy),
        ("pin", "gpt@2", "paper"), ("tag", "gpt@2", "a=b"), ("prune", "gpt", "--keep", "1", "--grace", "0s", "--yes"),
        ("gc",),
    ):  # fmt: skip
        succeed(*words, "--store", bucket.url)
    store = bucket.store("operator")
    assert len([info.key for info in store.list("gpt/attempts/") if info.key.endswith(".ckpt")]) == 1
    begin_upload(bucket.store("trainer"))
    assert (store.abort_uploads("gpt/", time.time() + 3600), bucket.used()) == (1, actions("operator"))
    key, secret = (bucket.options("operator")[name] for name in ("key", "secret"))
    own = {**bucket.service.environment, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    with running_daemon(bucket.url, environment={**os.environ, **own}) as daemon, daemon.client() as client:
        assert client.latest().step == 2
        assert client.probe().conditional_writes


def test_a_reader_exports_and_changes_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fill(bucket)
    bucket.used()
    monkeypatch.setitem(fsspec.config.conf, "s3", bucket.options("reader"))
    before = [info.key for info in bucket.store("reader").list("")]
    for words in (("ls", "gpt"), ("verify", "gpt@2"), ("export", "gpt@2", "--to", tmp_path / "m.safetensors")):
        assert invoke(*words, "--store", bucket.url).code == 0
    assert bucket.used() == actions("reader")
    assert invoke("rm", "gpt@1", "--yes", "--store", bucket.url).code != 0
    assert [info.key for info in bucket.store("reader").list("")] == before
