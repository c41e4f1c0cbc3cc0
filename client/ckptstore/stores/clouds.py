"""Google Cloud Storage and Azure Blob Storage: through gcsfs and adlfs, and listed by requests of our own.

Their libraries take a bucket or container that does not exist for an empty folder: a trainer would start from scratch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fsspec.asyn import sync
from typing_extensions import override

from ckptstore.errors import ObjectMissing
from ckptstore.stores.base import NOT_FOUND, ObjectInfo, http_status, no_such_bucket
from ckptstore.stores.remote import FsspecStore, modified_at


class CloudStore(FsspecStore):
    """A bucket, or a folder in a bucket, of a service that has no store of its own here."""

    _bucket_seen = False

    @abstractmethod
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Iterator[tuple[str, Any]]:
        """Names below a prefix, and what is there: None for a folder, which a delimiter ends. In any order.

        Raises an error with status 404 without the bucket.
        """

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for name, (size, written_at) in self._listed(prefix, None):
            yield ObjectInfo(self._key(name), size, written_at)

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        for name, found in self._listed(prefix, "/"):
            if found is None:
                yield name.rstrip("/").rpartition("/")[2]

    def _listed(self, prefix: str, delimiter: str | None) -> Sequence[tuple[str, Any]]:
        bucket, _, folder = self._path(prefix).partition("/")
        with super()._errors("list", prefix):
            try:
                found = [(f"{bucket}/{name}", each) for name, each in self._found(bucket, folder, delimiter)]
            except Exception as error:
                if isinstance(error, FileNotFoundError) or http_status(error) == NOT_FOUND:
                    raise no_such_bucket(self.object_url(prefix)) from error
                raise
        self._bucket_seen = True
        return sorted(found, key=lambda each: each[0].rstrip("/"))

    @contextmanager
    @override
    def _errors(self, what: str, key: str) -> Iterator[None]:
        """For a missing object look once whether there is a bucket at all: the reply need not say."""
        try:
            with super()._errors(what, key):
                yield
        except ObjectMissing:
            if not self._bucket_seen:
                self._listed(key, "/")
            raise


class GcsStore(CloudStore):
    """Google Cloud Storage by its JSON interface."""

    @override
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Iterator[tuple[str, Any]]:
        token = None
        while True:
            page = self._fs.call(
                "GET", "b/{}/o", bucket, prefix=prefix, delimiter=delimiter, pageToken=token, json_out=True
            )
            yield from ((name, None) for name in page.get("prefixes", []))
            yield from ((each["name"], (int(each["size"]), modified_at(each))) for each in page.get("items", []))
            if not (token := page.get("nextPageToken")):
                return


class AzureStore(CloudStore):
    """A container of Azure Blob Storage."""

    @override
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Iterator[tuple[str, Any]]:
        async def found() -> list[Any]:
            async with self._fs.service_client.get_container_client(bucket) as client:
                if delimiter:
                    return [each async for each in client.walk_blobs(prefix, delimiter=delimiter)]
                return [each async for each in client.list_blobs(prefix, include=["metadata"])]

        for each in sync(self._fs.loop, found):  # type: ignore[no-untyped-call]
            if each.name.endswith("/"):
                yield each.name, None
            # With a hierarchical namespace folders are listed as well.
            elif "hdi_isfolder" not in (each.metadata or {}):
                yield each.name, (each.size, each.last_modified.timestamp())
