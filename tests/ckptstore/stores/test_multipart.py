"""Uploads that were never finished leave parts that no listing shows; a collection frees them."""

from __future__ import annotations

from typing import Any

import pytest

from ckptstore.clock import system_clock
from ckptstore.errors import StoreUnavailable
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.stores import Store, open_store
from ckptstore.stores.base import is_lasting
from tests.conftest import S3Location
from tests.support.runs import RUN


def test_old_uploads_are_aborted_and_young_ones_are_not(s3_store: S3Location) -> None:
    store = open_store(s3_store.url, s3_store.options)
    s3: Any = store._fs  # type: ignore[attr-defined]
    bucket, _, folder = s3_store.url.removeprefix("s3://").partition("/")
    key = f"{folder}/{RunKeys(RUN).shard(Attempt(1, new_ulid(0)), 'shard-00000.ckpt')}"
    begun = s3.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    s3.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 100)
    prefix = RunKeys(RUN).attempts
    assert store.abort_uploads(prefix, system_clock() - 60) == 0
    assert store.abort_uploads("other/attempts/", system_clock() + 60) == 0
    assert store.abort_uploads(prefix, system_clock() + 60) == 1
    assert store.abort_uploads(prefix, system_clock() + 60) == 0


@pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
def test_other_stores_have_none(store: Store) -> None:
    assert store.abort_uploads("gpt/attempts/", system_clock()) == 0


def test_an_upload_that_the_service_aborts_is_an_outage_and_not_a_missing_object(s3_store: S3Location) -> None:
    store = open_store(s3_store.url, s3_store.options)

    def write_while_it_is_aborted() -> None:
        with store.open_writer("gpt/a", size_hint=24 << 20) as writer:
            writer.write(bytes(9 << 20))
            while not store.abort_uploads("gpt/", system_clock() + 60):
                pass  # the upload begins in another thread
            writer.write(bytes(15 << 20))

    with pytest.raises(StoreUnavailable, match="aborted its upload") as caught:
        write_while_it_is_aborted()
    assert is_lasting(caught.value), "the same upload is not tried for minutes"
    assert not list(store.list("gpt/"))
