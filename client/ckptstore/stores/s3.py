"""S3 and services that speak its protocol.

s3fs makes the small requests: conditional writes, listings, deletes, and the first and last request of an upload.
transfers.py moves bulk bytes directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptstore.stores.base import ObjectInfo, ObjectReader, ObjectWriter, too_short
from ckptstore.stores.failures import store_errors
from ckptstore.stores.multipart import BUFFERED_BYTES, MultipartWriter
from ckptstore.stores.remote import FsspecStore
from ckptstore.stores.transfers import Transfers

_LONGEST_READ = 64 << 20
"""A request costs the service as much as about 3 MB of data, and 3 MB more if it begins inside contiguous data."""
_LONGEST_GAP = 1 << 20
"""Up to this gap, reading and discarding bytes is cheaper than a new request."""


class S3Store(FsspecStore):
    """A bucket, or a folder in a bucket."""

    parallel_reads = 8
    upload_bytes = BUFFERED_BYTES

    def __init__(self, fs: Any, root: str, url: str) -> None:
        """fs: an s3fs.S3FileSystem."""
        super().__init__(fs, root, url)
        self._transfers = Transfers(fs)
        # s3fs holds a whole range in memory.
        self.longest_read = _LONGEST_READ if self._transfers.suitable else 0

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """A multipart upload: concurrent parts in bounded memory."""
        path, url = self._path(key), self.object_url(key)
        return MultipartWriter(self._fs, self._transfers, path, url, size_hint, self.upload_bytes)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """One ranged GET, retried and resumed where it broke off."""
        if not len(buffer):
            return 0
        with store_errors("read", self.object_url(key)):
            return self._transfers.read_into(self._path(key), offset, buffer)

    def open_reader(self, key: str) -> ObjectReader:
        """Read with one ranged GET per expected range."""
        return _S3Reader(self._transfers, self._path(key), self.object_url(key))

    def get(self, key: str) -> bytes:
        """One GET; s3fs would request the size first."""
        with store_errors("read", self.object_url(key)):
            return self._transfers.read(self._path(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """One request per thousand objects; s3fs makes three for an empty folder."""
        with store_errors("list", self.object_url(prefix)):
            found = [each for page in self._pages(prefix, "") for each in page.get("Contents", [])]
        for each in sorted(found, key=lambda each: str(each["Key"])):
            # SeaweedFS briefly lists a folder after its last object is deleted.
            if not each["Key"].endswith("/"):
                yield ObjectInfo(self._key_of(each["Key"]), each["Size"], each["LastModified"].timestamp())

    def list_folders(self, prefix: str) -> Iterator[str]:
        """The same for one level."""
        with store_errors("list", self.object_url(prefix)):
            found = [each["Prefix"] for page in self._pages(prefix, "/") for each in page.get("CommonPrefixes", [])]
        yield from sorted(folder.rstrip("/").rpartition("/")[2] for folder in found)

    def _pages(self, prefix: str, delimiter: str) -> Iterator[dict[str, Any]]:
        bucket, _, folder = self._path(prefix).partition("/")
        position: dict[str, str] = {}
        try:
            while True:
                where = {"Bucket": bucket, "Prefix": folder, "Delimiter": delimiter, **position}
                page = self._fs.call_s3("list_objects_v2", **where)
                yield page
                if not page.get("IsTruncated"):
                    return
                position = {"ContinuationToken": page["NextContinuationToken"]}
        except FileNotFoundError:
            return  # no such bucket: nothing has been written yet

    def _key_of(self, name: str) -> str:
        """The key of the object with this name in the bucket."""
        return name.removeprefix(self._root.partition("/")[2]).lstrip("/")

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """Parts of unfinished uploads do not appear in object listings."""
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


class _S3Reader(ObjectReader):
    """Streams each expected range from one reply."""

    def __init__(self, transfers: Transfers, path: str, url: str) -> None:
        self.small_reads = transfers.suitable
        self._transfers = transfers
        self._path = path
        self._url = url
        self._span = transfers.open(path, 0, 0)

    def expect(self, offset: int, num_bytes: int) -> None:
        """Sends no request before the first read."""
        self._span.close()
        self._span = self._transfers.open(self._path, offset, num_bytes)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Read from the open reply if the range is in it."""
        gap = offset - self._span.at
        if not 0 <= gap <= _LONGEST_GAP or offset + len(buffer) > self._span.end:
            self.expect(offset, len(buffer))
            gap = 0
        with store_errors("read", self._url):
            if gap:
                self._span.read(memoryview(bytearray(gap)))
            count = self._span.read(buffer)
        if count != len(buffer):
            raise too_short(self._url, offset, count, len(buffer))

    def close(self) -> None:
        """Return the connection to the pool."""
        self._span.close()
