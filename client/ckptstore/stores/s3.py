"""S3 and services that speak its protocol.

s3fs does what is small or must be exact: conditional writes, listings, deletes, and the first and last request of an
upload. Bulk bytes take the direct way (transfers.py).
"""

from __future__ import annotations

from typing import Any

from ckptstore.stores.base import ObjectWriter
from ckptstore.stores.failures import store_errors
from ckptstore.stores.multipart import MultipartWriter
from ckptstore.stores.remote import FsspecStore
from ckptstore.stores.transfers import Transfers


class S3Store(FsspecStore):
    """A bucket, or a folder of one."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        """fs: an s3fs.S3FileSystem."""
        super().__init__(fs, root, url)
        self._transfers = Transfers(fs)

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """A multipart upload; several parts at a time, within a fixed memory."""
        return MultipartWriter(self._fs, self._transfers, self._path(key), self.object_url(key), size_hint)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """One ranged GET, tried again and continued where it broke off."""
        if not len(buffer):
            return 0
        with store_errors("read", self.object_url(key)):
            return self._transfers.read_into(self._path(key), offset, buffer)

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """No listing of objects shows the parts of unfinished uploads."""
        bucket, _, folder = self._path(prefix).partition("/")
        with store_errors("abort uploads in", self.object_url(prefix)):
            aborted = 0
            position: dict[str, str] = {}
            while True:
                page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=folder, **position)
                for upload in page.get("Uploads", []):
                    if upload["Initiated"].timestamp() < begun_before:
                        self._transfers.abort(f"{bucket}/{upload['Key']}", upload["UploadId"])
                        aborted += 1
                if not page.get("IsTruncated"):
                    return aborted
                position = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def presign(self, key: str, seconds: float) -> str | None:
        """Signed here, without asking the service."""
        with store_errors("sign a URL of", self.object_url(key)):
            return str(self._fs.sign(self._path(key), expiration=max(1, round(seconds))))
