"""Multipart uploads to S3: concurrent parts, in bounded memory."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from ckptstore.format.codecs import Buffer
from ckptstore.stores.base import ObjectWriter
from ckptstore.stores.busy import BusyTime
from ckptstore.stores.failures import store_errors
from ckptstore.stores.transfers import Transfers, UploadPart

PART_BYTES = 8 << 20
"""Smallest part. S3 transfers a single request at about 90 MB/s whatever its size, and rejects parts below 5 MiB."""
BUFFERED_BYTES = 96 << 20
"""Most bytes that one writer buffers."""
_MAX_PARTS = 9_000  # S3 allows 10,000; encoded bytes may slightly exceed the size hint
_PARTS_OF_ONE_SIZE = 1_000


def part_bytes(number: int, size_hint: int) -> int:
    """Size of the part with this number, from 1. With a size hint all parts are equal, as some services require.

    Without a hint, sizes double every thousand parts: 8 GiB need the least memory, and 8 TiB are possible.
    """
    if not size_hint:
        return PART_BYTES << (number - 1) // _PARTS_OF_ONE_SIZE
    megabytes = -(-size_hint // (_MAX_PARTS << 20))
    return max(PART_BYTES, megabytes << 20)


class MultipartWriter(ObjectWriter):
    """A multipart upload, or a single PUT if all bytes fit into one part. Only writable buffers are copied."""

    def __init__(
        self, fs: Any, transfers: Transfers, path: str, url: str, size_hint: int, buffered_bytes: int = BUFFERED_BYTES
    ) -> None:
        """Sends nothing before the first part is full. path: in the file system `fs`; url: for messages.

        buffered_bytes: limit for the part being filled and the parts in flight; at least one of each is allowed.
        """
        self._fs = fs
        self._transfers = transfers
        self._path = path
        self._url = url
        self._size_hint = size_hint
        self._buffered_bytes = buffered_bytes
        self._bytes = 0
        self._part = UploadPart(1, part_bytes(1, size_hint))
        self._upload: str | None = None
        self._in_flight: dict[Future[dict[str, Any]], UploadPart] = {}
        self._sent: list[dict[str, Any]] = []
        self._committing = False
        self._stop = threading.Event()
        self._busy = BusyTime()
        threads = max(1, buffered_bytes // self._part.room - 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-upload-part")

    @property
    def busy_s(self) -> float:
        """Seconds in which parts were in flight."""
        return self._busy.seconds

    def write(self, data: Buffer) -> None:
        """Fill parts and send them; waits while the buffer limit is reached."""
        rest = memoryview(data)
        if not rest.readonly:
            rest = memoryview(bytes(rest))
        self._bytes += len(rest)
        with store_errors("write", self._url):
            while len(rest):
                if not self._part.room:
                    self._send()
                rest = self._part.take(rest)

    def commit(self) -> None:
        """Wait for all parts, then complete the upload."""
        with store_errors("write", self._url):
            if self._upload is None:
                self._committing = True
                self._fs.pipe_file(self._path, b"".join(self._part.pieces))
            else:
                self._send()
                while self._in_flight:
                    self._reap()
                self._complete(self._upload)
        self._threads.shutdown()

    def abort(self) -> None:
        """Abort the upload and free its parts."""
        self._stop.set()
        # A part that arrives after the abort would remain.
        self._threads.shutdown(cancel_futures=True)
        try:
            if self._upload is not None:
                self._transfers.abort(self._path, self._upload)
        except Exception:
            pass  # collected after a day, or by the service's lifecycle rule
        try:
            if self._committing:
                self._fs.rm_file(self._path)  # the commit succeeded and its reply was lost
        except Exception:
            pass  # an object without a receipt is collected with its attempt

    def _send(self) -> None:
        """Send the current part and begin the next one; waits until its bytes fit into the buffer limit."""
        if self._upload is None:
            self._upload = self._transfers.begin(self._path)
        part, number = self._part, self._part.number + 1
        self._part = UploadPart(number, part_bytes(number, self._size_hint))
        sent = self._threads.submit(self._put, self._upload, part)
        self._in_flight[sent] = part
        while self._in_flight and self._held() + self._part.room > self._buffered_bytes:
            self._reap()

    def _held(self) -> int:
        return sum(map(len, self._in_flight.values()))

    def _put(self, upload: str, part: UploadPart) -> dict[str, Any]:
        with self._busy:
            return self._transfers.put_part(self._path, upload, part, self._stop)

    def _reap(self) -> None:
        """Wait until one of the parts has arrived."""
        for arrived in wait(self._in_flight, return_when=FIRST_COMPLETED).done:
            del self._in_flight[arrived]
            self._sent.append(arrived.result())

    def _complete(self, upload: str) -> None:
        self._committing = True
        parts = sorted(self._sent, key=lambda part: int(part["PartNumber"]))
        try:
            self._transfers.complete(self._path, upload, parts)
        except Exception:
            # The upload may be complete with its reply lost: completing it again fails on some servers.
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            return bool(self._fs.size(self._path) == self._bytes)
        except Exception:
            return False
