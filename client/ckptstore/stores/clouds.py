"""Google Cloud Storage and Azure Blob Storage: through gcsfs and adlfs, with listings and transfers of our own.

Their libraries take a bucket or container that does not exist for an empty folder: a trainer would start from scratch.
And they send one part after the other, with no checksum, and hold ranges in memory.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from fsspec.asyn import sync
from typing_extensions import override
from urllib3 import BaseHTTPResponse

from ckptstore.clock import system_clock
from ckptstore.errors import ObjectMissing
from ckptstore.stores.multipart import Found, MultipartStore
from ckptstore.stores.remote import modified_at
from ckptstore.stores.transfers import (
    SIGNED_FOR_S,
    Addressed,
    PartEntry,
    TransferFailed,
    Transfers,
    UploadPart,
    element,
    proxy_of,
)

_SCOPE = "https://storage.azure.com/.default"


class CloudTransfers(Transfers):
    """By requests that the library authorizes."""

    def request(self, method: str, path: str, query: str, body: Any = None, **headers: str) -> BaseHTTPResponse:
        """The reply to one request. Raises the error of a reply that refuses."""
        url, own = self._readable(path)
        return self.ask(method, f"{url}{'&' if '?' in url else '?'}{query}", own | headers, body)

    @override
    def put_part(self, path: str, upload: str, part: UploadPart, stop: threading.Event, retry_s: float) -> PartEntry:
        query, headers = self._described(upload, part)
        headers["Content-Length"] = str(len(part))
        reply = self.sent(lambda: self.request("PUT", path, query, part.pieces, **headers), None, stop, retry_s)
        return {"PartNumber": part.number, "ETag": reply.headers.get("ETag")}

    @abstractmethod
    def _described(self, upload: str, part: UploadPart) -> Addressed:
        """Query and checksum header of a part."""


class CloudStore(MultipartStore):
    """A bucket, or a folder in a bucket, of a service that has no store of its own here."""

    _transfers: CloudTransfers

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


class GcsTransfers(CloudTransfers):
    """By the XML interface: parts of an upload that go side by side exist only there."""

    def __init__(self, fs: Any, retried: bool) -> None:
        """fs: a gcsfs.GCSFileSystem. retried: see Transfers."""
        from google_crc32c import extend

        self._crc32c = extend
        super().__init__(fs, retried, fs.session_kwargs.get("trust_env") and proxy_of(fs._location))

    @override
    def _readable(self, path: str) -> Addressed:
        payer = self.fs._get_params({}).get("userProject")
        return f"{self.fs._location}/{quote(path)}", self.fs._get_headers(
            {"x-goog-user-project": payer} if payer else {}
        )

    @override
    def begin(self, path: str) -> str:
        return element("UploadId", self.sent(lambda: self.request("POST", path, "uploads")).data)

    @override
    def _described(self, upload: str, part: UploadPart) -> Addressed:
        crc = 0
        for piece in part.pieces:
            crc = self._crc32c(crc, bytes(piece))  # it refuses a view
        checksum = base64.b64encode(crc.to_bytes(4, "big")).decode()
        return f"partNumber={part.number}&uploadId={upload}", {"x-goog-hash": f"crc32c={checksum}"}

    @override
    def complete(self, path: str, upload: str, parts: list[PartEntry]) -> None:
        listed = "".join(
            f"<Part><PartNumber>{part['PartNumber']}</PartNumber><ETag>{part['ETag']}</ETag></Part>" for part in parts
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>"
        reply = self.request("POST", path, f"uploadId={upload}", body.encode())
        if not element("ETag", reply.data):  # an error may follow the status
            raise TransferFailed("the service did not complete the upload")

    @override
    def abort(self, path: str, upload: str) -> None:
        try:
            self.request("DELETE", path, f"uploadId={upload}")
        except FileNotFoundError:
            pass


class GcsStore(CloudStore):
    """Google Cloud Storage: small objects and listings by its JSON interface."""

    transfers = GcsTransfers
    create_only = "ifGenerationMatch=0"

    @override
    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """Unlike resumable uploads these never expire: their parts would be paid for ever."""
        bucket, _, folder = self._path(prefix).partition("/")
        with self._errors("abort uploads in", prefix):
            listed = self._transfers.request("GET", bucket, f"uploads&prefix={quote(folder)}").data.split(b"<Upload>")
            old = [
                each for each in listed[1:]
                if datetime.fromisoformat(element("Initiated", each)).timestamp() < begun_before
            ]  # fmt: skip
            for each in old:
                self._transfers.abort(f"{bucket}/{element('Key', each)}", element("UploadId", each))
        # A page has a thousand.
        return len(old) + (self.abort_uploads(prefix, begun_before) if old else 0)

    @override
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Found:
        token = None
        while True:
            page = self._fs.call(
                "GET", "b/{}/o", bucket, prefix=prefix, delimiter=delimiter, pageToken=token, json_out=True
            )
            yield from ((name, None) for name in page.get("prefixes", []))
            yield from ((each["name"], (int(each["size"]), modified_at(each))) for each in page.get("items", []))
            if not (token := page.get("nextPageToken")):
                return


class AzureTransfers(CloudTransfers):
    """By lists of blocks. The service collects blocks without a list after a week."""

    def __init__(self, fs: Any, retried: bool) -> None:
        """fs: an adlfs.AzureBlobFileSystem. retried: see Transfers."""
        from azure.storage.blob import generate_blob_sas

        self._sign = generate_blob_sas
        super().__init__(fs, retried, proxy_of(fs.service_client.url))

    @override
    def _readable(self, path: str) -> Addressed:
        client = self.fs.service_client
        endpoint, _, query = client.url.partition("?")
        headers = {"x-ms-version": client.api_version}
        credential = client.credential
        if hasattr(credential, "account_key"):
            container, _, blob = path.partition("/")
            query = self._sign(
                credential.account_name, container, blob, account_key=credential.account_key,
                permission="rw", expiry=datetime.fromtimestamp(system_clock() + SIGNED_FOR_S, UTC),
            )  # fmt: skip
        elif credential is not None:
            token = sync(self.fs.loop, credential.get_token, _SCOPE)  # type: ignore[no-untyped-call]
            headers["Authorization"] = f"Bearer {token.token}"
        return f"{endpoint.rstrip('/')}/{quote(path)}?{query}", headers

    @override
    def begin(self, path: str) -> str:
        return uuid.uuid4().hex  # with eight digits it is valid base64, the id of a block

    @override
    def _described(self, upload: str, part: UploadPart) -> Addressed:
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in part.pieces:
            md5.update(piece)
        checksum = base64.b64encode(md5.digest()).decode()
        return f"comp=block&blockid={upload}{part.number:08}", {"Content-MD5": checksum}

    @override
    def complete(self, path: str, upload: str, parts: list[PartEntry]) -> None:
        listed = "".join(f"<Latest>{upload}{part['PartNumber']:08}</Latest>" for part in parts)
        self.request("PUT", path, "comp=blocklist", f"<BlockList>{listed}</BlockList>".encode())


class AzureStore(CloudStore):
    """A container of Azure Blob Storage."""

    transfers = AzureTransfers
    create_only = "If-None-Match: *"

    @override
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Found:
        async def found() -> list[Any]:
            async with self._fs.service_client.get_container_client(bucket) as client:
                if delimiter:
                    listed = client.walk_blobs(prefix, delimiter=delimiter)
                else:
                    listed = client.list_blobs(prefix, include=["metadata"])
                return [each async for each in listed]

        for each in sync(self._fs.loop, found):  # type: ignore[no-untyped-call]
            if each.name.endswith("/"):
                yield each.name, None
            # With a hierarchical namespace folders are listed as well.
            elif "hdi_isfolder" not in (each.metadata or {}):
                yield each.name, (each.size, each.last_modified.timestamp())
