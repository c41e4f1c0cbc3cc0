"""Object stores whose bulk bytes go in concurrent requests of our own, in bounded memory.

The service's fsspec library does the rest.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import ObjectMissing, StoreUnavailable
from ckptstore.retry import outage_pauses, retry
from ckptstore.stores.base import ObjectInfo, ObjectReader, ObjectWriter, check_length, is_lasting, no_such_bucket
from ckptstore.stores.remote import FsspecStore, is_there
from ckptstore.stores.transfers import ByteSpan, PartEntry, Transfers, UploadPart

PART_BYTES = 8 << 20
"""Smallest part. S3 transfers a single request at about 90 MB/s whatever its size, and rejects parts below 5 MiB."""
BUFFERED_BYTES = 96 << 20
"""Most bytes that one writer buffers."""
_MAX_PARTS = 9_000  # S3 allows 10,000; encoded bytes may slightly exceed the size hint
_PARTS_OF_ONE_SIZE = 1_000

_T = TypeVar("_T")
_Errors = Callable[[], AbstractContextManager[None]]
"""Translates the errors of requests for one object."""
Found = Iterator[tuple[str, Any]]
"""Names in a bucket, and size and time of what is there: None for a folder."""


def part_bytes(number: int, size_hint: int) -> int:
    """Size of the part with this number, from 1. With a size hint all parts are equal, as some services require.

    Without a hint, sizes double every thousand parts: 8 GiB need the least memory, and 8 TiB are possible.
    """
    if not size_hint:
        return PART_BYTES << (number - 1) // _PARTS_OF_ONE_SIZE
    megabytes = -(-size_hint // (_MAX_PARTS << 20))
    return max(PART_BYTES, megabytes << 20)


@dataclass
class MultipartWriter(ObjectWriter):
    """A multipart upload, or a single PUT if all bytes fit into one part. Only writable buffers are copied.

    Begins the upload if several parts are expected: its id is there when the first one is full.
    """

    _fs: Any
    _transfers: Transfers
    _path: str
    """In the file system."""
    _errors: _Errors
    _size_hint: int
    _buffered_bytes: int
    """Limit for the part being filled and the parts in flight; at least one of each is allowed."""
    _retry_s: float
    """How long each request is repeated at most."""
    _replaces: bool
    """The object may exist, and stays if this fails."""

    def __post_init__(self) -> None:
        self._bytes = 0
        self._part = UploadPart(1, part_bytes(1, self._size_hint))
        self._upload: Future[str] | None = None
        """Its id."""
        self._in_flight: dict[Future[PartEntry], UploadPart] = {}
        self._sent: list[PartEntry] = []
        self._committing = False
        self._stop = threading.Event()
        threads = max(1, self._buffered_bytes // self._part.unused - 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-upload-part")
        if self._size_hint > self._part.unused:
            self._begin()

    @override
    def write(self, data: Buffer) -> None:
        rest = memoryview(data)
        if not rest.readonly:
            rest = memoryview(bytes(rest))
        self._bytes += len(rest)
        with self._errors():
            while len(rest):
                if not self._part.unused:
                    self._send()
                rest = self._part.take(rest)

    @override
    def commit(self) -> None:
        with self._errors():
            if self._upload is not None:
                self._send()
                while self._in_flight:
                    self._reap()
            self._committing = True
            self._repeat(self._complete)
        self._threads.shutdown()

    @override
    def abort(self) -> None:
        self._stop.set()
        # A part that arrives after the abort would remain.
        self._threads.shutdown(cancel_futures=True)
        try:
            if self._upload is not None:
                self._transfers.abort(self._path, self._upload.result())
        except Exception:
            pass  # collected after a day, or by the service's lifecycle rule
        try:
            if self._committing and not self._replaces:
                self._fs.rm_file(self._path)  # the commit succeeded and its reply was lost
        except Exception:
            pass  # an object without a receipt is collected with its attempt

    def _send(self) -> None:
        """Send the current part and begin the next one; waits until its bytes fit into the buffer limit."""
        upload = self._begin().result()
        part, number = self._part, self._part.number + 1
        self._part = UploadPart(number, part_bytes(number, self._size_hint))
        put = self._transfers.put_part
        self._in_flight[self._threads.submit(put, self._path, upload, part, self._stop, self._retry_s)] = part
        while self._in_flight and sum(map(len, self._in_flight.values())) + self._part.unused > self._buffered_bytes:
            self._reap()

    def _begin(self) -> Future[str]:
        if self._upload is None:
            self._upload = self._threads.submit(self._repeat, lambda: self._transfers.begin(self._path))
        return self._upload

    def _reap(self) -> None:
        """Wait until one of the parts has arrived."""
        for arrived in wait(self._in_flight, return_when=FIRST_COMPLETED).done:
            del self._in_flight[arrived]
            self._sent.append(arrived.result())

    def _complete(self) -> None:
        """Make the object visible: of one part by a single request."""
        if self._upload is None:
            self._fs.pipe_file(self._path, b"".join(self._part.pieces))
            return
        parts = sorted(self._sent, key=lambda part: int(part["PartNumber"]))
        try:
            self._transfers.complete(self._path, self._upload.result(), parts)
        except Exception:
            # The upload may be complete with its reply lost: completing it again fails on some servers.
            if self._replaces or not is_there(self._fs, self._path, self._bytes):
                raise

    def _repeat(self, request: Callable[[], _T]) -> _T:
        """The result of a request of the library, which may itself retry for a while."""

        def translated() -> _T:
            with self._errors():
                return request()

        return retry(
            translated, StoreUnavailable, outage_pauses(self._retry_s), unless=is_lasting, sleep=self._stop.wait
        )


_LONGEST_READ = 64 << 20
"""A request costs the service as much as about 3 MB of data, and 3 MB more if it begins inside contiguous data."""
_LONGEST_GAP = 1 << 20
"""Up to this gap, reading and discarding bytes is cheaper than a new request."""


class MultipartStore(FsspecStore):
    """A bucket, or a folder in a bucket."""

    transfers: Callable[[Any, bool], Transfers]
    """Its own, of a file system and `retried`."""
    parallel_reads = 8
    upload_bytes = BUFFERED_BYTES
    resumes_uploads = True
    _bucket_seen = False

    def __init__(self, fs: Any, url: str, retried: bool) -> None:
        """fs: a file system of the service's library. retried: see open_store."""
        super().__init__(fs, url)
        self._transfers = self.transfers(fs, retried)
        # For a whole object s3fs would request the size first.
        self._read, self._read_range = self._transfers.read, self._transfers.read_into
        # A library holds a whole range in memory.
        self.longest_read = _LONGEST_READ if self._transfers.suitable else 0

    @abstractmethod
    def _found(self, bucket: str, prefix: str, delimiter: str | None) -> Found:
        """Objects and folders below a prefix, in any order; a delimiter ends the folders.

        Raises FileNotFoundError, or an error with status 404, without the bucket.
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
        try:
            with super()._errors("list", prefix):
                found = [(f"{bucket}/{name}", each) for name, each in self._found(bucket, folder, delimiter)]
        except ObjectMissing as error:
            raise no_such_bucket(self.object_url(prefix)) from error
        self._bucket_seen = True
        return sorted(found, key=lambda each: each[0].rstrip("/"))

    @override
    def open_writer(self, key: str, size_hint: int = 0, replaces: bool = False) -> ObjectWriter:
        errors = partial(self._errors, "write", key)
        limits = size_hint, self.upload_bytes, self.retry_s
        return MultipartWriter(self._fs, self._transfers, self._path(key), errors, *limits, replaces)

    @override
    def open_replacement(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """An upload: its object is visible only when it is complete."""
        return self.open_writer(key, size_hint, replaces=True)

    @override
    def open_reader(self, key: str) -> ObjectReader:
        """Read with one ranged GET per expected range."""
        nothing_yet = ByteSpan(self._transfers, self._path(key), 0, 0)
        errors = partial(self._errors, "read", key)
        return _SpanReader(nothing_yet, self.object_url(key), errors, self._transfers.suitable)


@dataclass
class _SpanReader(ObjectReader):
    """Streams each expected range from one reply."""

    _span: ByteSpan
    _url: str
    _errors: _Errors
    small_reads: bool

    def expect(self, offset: int, num_bytes: int, again: bool = True) -> None:
        """Sends no request before the first read."""
        self._span.close()
        self._span = replace(self._span, at=offset, end=offset + num_bytes)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Read from the open reply if the range is in it."""
        gap = offset - self._span.at
        if not 0 <= gap <= _LONGEST_GAP or offset + len(buffer) > self._span.end:
            self.expect(offset, len(buffer))
            gap = 0
        with self._errors():
            if gap:
                self._span.read(memoryview(bytearray(gap)))
            count = self._span.read(buffer)
        check_length(self._url, offset, count, len(buffer))

    def close(self) -> None:
        """Return the connection to the pool."""
        self._span.close()
