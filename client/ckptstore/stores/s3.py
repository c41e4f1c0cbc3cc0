"""S3: listings through s3fs, bulk bytes over URLs that it signs."""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from ckptstore.stores.base import store_errors
from ckptstore.stores.multipart import Found, MultipartStore
from ckptstore.stores.transfers import (
    READ_TIMEOUT_S,
    SIGNED_FOR_S,
    Addressed,
    PartEntry,
    Transfers,
    UploadPart,
    proxy_of,
)

try:
    from isal.isal_zlib import crc32
except ImportError:  # the same result at a quarter of the speed
    from zlib import crc32

logger = logging.getLogger(__name__)

_CHECKSUM = "x-amz-checksum-crc32"


class S3Transfers(Transfers):
    """By URLs that s3fs signs."""

    def __init__(self, fs: Any, retried: bool) -> None:
        """fs: an s3fs.S3FileSystem. retried: see Transfers."""
        config = {"connect_timeout": fs.connect_timeout, "read_timeout": READ_TIMEOUT_S, **fs.config_kwargs}
        verify = fs.client_kwargs.get("verify", True)
        self._checksums = config.get("request_checksum_calculation") != "when_required"
        super().__init__(
            fs,
            retried,
            connect_s=config["connect_timeout"],
            read_s=config["read_timeout"],
            ca_certs=verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE"),
        )
        self.suitable = verify is not False and not config.get("proxies") and not proxy_of(fs.endpoint_url)
        if not self.suitable:
            logger.info("s3fs makes all transfers, which is slower: a proxy is set, or certificates are not verified")

    @override
    def _readable(self, path: str) -> Addressed:
        return self.fs.url(path, expires=SIGNED_FOR_S), {}

    @override
    def begin(self, path: str) -> str:
        checksum = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        return str(self.call("create_multipart_upload", path, **checksum)["UploadId"])

    @override
    def put_part(self, path: str, upload: str, part: UploadPart, stop: threading.Event, retry_s: float) -> PartEntry:
        parameters: dict[str, Any] = {"UploadId": upload, "PartNumber": part.number}
        headers = {"Content-Length": str(len(part))}
        crc = crc32_of(part) if self._checksums else ""
        if crc:
            parameters["ChecksumCRC32"] = headers[_CHECKSUM] = crc

        def put() -> PartEntry:
            url = self.fs.url(path, expires=SIGNED_FOR_S, client_method="upload_part", **parameters)
            reply = self.ask("PUT", url, headers, part.pieces)
            done = {"PartNumber": part.number, "ETag": reply.headers["ETag"]}
            # A service that returns the checksum has verified it, and requires it again at completion.
            return {**done, "ChecksumCRC32": crc} if crc and reply.headers.get(_CHECKSUM) == crc else done

        def put_by_s3fs() -> PartEntry:
            reply = self.call("upload_part", path, Body=b"".join(part.pieces), **parameters)
            fields = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
            return {"PartNumber": part.number, **fields}

        return self.sent(put, put_by_s3fs, stop, retry_s)

    @override
    def complete(self, path: str, upload: str, parts: list[PartEntry]) -> None:
        self.call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})

    @override
    def abort(self, path: str, upload: str) -> None:
        try:
            self.call("abort_multipart_upload", path, UploadId=upload)
        except FileNotFoundError:
            pass

    def call(self, method: str, path: str, **parameters: Any) -> Any:
        """The reply to a request of s3fs for an object."""
        bucket, key, _ = self.fs.split_path(path)
        return self.fs.call_s3(method, Bucket=bucket, Key=key, **parameters)


def crc32_of(part: UploadPart) -> str:
    """The checksum in S3's encoding, base64."""
    crc = 0
    for piece in part.pieces:
        crc = crc32(piece, crc)
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


class S3Store(MultipartStore):
    """A bucket, or a folder in a bucket."""

    transfers = S3Transfers
    _transfers: S3Transfers
    create_only = "If-None-Match: *"

    def reconnect(self) -> None:
        """A new session of botocore, which looks for credentials in the environment, in files and at services."""
        with store_errors("connect to", self.url):
            self._fs.connect(refresh=True)

    def size(self, key: str) -> int:
        """One HEAD; s3fs would look for a folder as well if there is no object."""
        with self._errors("look at", key):
            return int(self._transfers.call("head_object", self._path(key))["ContentLength"])

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """Parts of unfinished uploads do not appear in object listings."""
        bucket, _, folder = self._path(prefix).partition("/")
        aborted = 0
        with self._errors("abort uploads in", prefix):
            for page in self._pages("list_multipart_uploads", bucket, folder, "KeyMarker", "UploadIdMarker"):
                for upload in page.get("Uploads", []):
                    if upload["Initiated"].timestamp() < begun_before:
                        self._transfers.abort(f"{bucket}/{upload['Key']}", upload["UploadId"])
                        aborted += 1
        return aborted

    @override
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Found:
        # One request per thousand objects; s3fs makes three for an empty folder.
        for page in self._pages("list_objects_v2", bucket, prefix, "ContinuationToken", Delimiter=delimiter or ""):
            yield from ((each["Prefix"], None) for each in page.get("CommonPrefixes", []))
            for each in page.get("Contents", []):
                # SeaweedFS briefly lists a folder after its last object is deleted.
                if not each["Key"].endswith("/"):
                    yield each["Key"], (each["Size"], each["LastModified"].timestamp())

    def _pages(
        self, method: str, bucket: str, prefix: str, *markers: str, **parameters: str
    ) -> Iterator[dict[str, Any]]:
        """The replies to a request for all objects below a prefix. markers: where the next page begins."""
        while True:
            page = self._fs.call_s3(method, Bucket=bucket, Prefix=prefix, **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            parameters |= {marker: page[f"Next{marker}"] for marker in markers}
