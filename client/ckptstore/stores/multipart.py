"""One large object to S3: parts of it go up side by side, from as much memory as is stated here."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from ckptstore.codecs import Buffer
from ckptstore.stores.base import ObjectWriter
from ckptstore.stores.failures import store_errors
from ckptstore.stores.transfers import Transfers

PART_BYTES = 8 << 20
"""The least: S3 gives a single request some 90 MB/s whatever its size, and takes no parts below 5 MiB."""
BUFFERED_BYTES = 96 << 20
"""Memory of one writer: the part being filled and those on their way. Two parts, if these are larger."""
_MAX_PARTS = 9_000  # S3 takes 10,000; encoded bytes may be a little more than was expected
_PARTS_OF_ONE_SIZE = 1_000


def part_bytes(number: int, size_hint: int) -> int:
    """Bytes of the part with this number, from 1. Equal parts of an object of known size, which some services demand.

    Without a hint they double every thousand parts: 8 GiB take the least memory, and 8 TiB are possible.
    """
    if not size_hint:
        return PART_BYTES << (number - 1) // _PARTS_OF_ONE_SIZE
    megabytes = -(-size_hint // (_MAX_PARTS << 20))
    return max(PART_BYTES, megabytes << 20)


class MultipartWriter(ObjectWriter):
    """A multipart upload, or a single PUT if all fits into one part."""

    def __init__(self, fs: Any, transfers: Transfers, path: str, url: str, size_hint: int) -> None:
        """Nothing is sent before the first part is full. path: in the file system `fs`; url: for messages."""
        self._fs = fs
        self._transfers = transfers
        self._path = path
        self._url = url
        self._size_hint = size_hint
        self._bytes = 0
        self._number = 1
        self._part = bytearray(part_bytes(1, size_hint))
        self._filled = 0
        self._upload: str | None = None
        self._on_their_way: dict[Future[dict[str, Any]], bytearray] = {}
        self._sent: list[dict[str, Any]] = []
        self._committing = False
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(
            max(1, BUFFERED_BYTES // len(self._part) - 1), thread_name_prefix="ckpt-upload-part"
        )

    def write(self, data: Buffer) -> None:
        """Copy into parts; waits while all memory is on its way."""
        rest = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self._bytes += len(rest)
        with store_errors("write", self._url):
            while len(rest):
                if self._filled == len(self._part):
                    self._send()
                    self._part = self._next_part()
                    self._filled = 0
                taken = rest[: len(self._part) - self._filled]
                self._part[self._filled : self._filled + len(taken)] = taken
                self._filled += len(taken)
                rest = rest[len(taken) :]

    def commit(self) -> None:
        """Wait for all parts, then complete the upload."""
        with store_errors("write", self._url):
            self._committing = self._upload is None
            if self._upload is None:
                self._fs.pipe_file(self._path, bytes(memoryview(self._part)[: self._filled]))
            else:
                self._send()
                while self._on_their_way:
                    self._reap()
                self._complete(self._upload)
        self._threads.shutdown()

    def abort(self) -> None:
        """Give all parts back."""
        self._stop.set()
        # What arrives after the abort would stay.
        self._threads.shutdown(cancel_futures=True)
        try:
            if self._upload is not None:
                self._transfers.abort(self._path, self._upload)
        except Exception:
            pass  # collected after a day, or by the service's life-cycle rule
        try:
            if self._committing:
                self._fs.rm_file(self._path)  # it was done, and the reply was lost
        except Exception:
            pass  # an object without a receipt is collected with its attempt

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._transfers.begin(self._path)
        data = memoryview(self._part)[: self._filled]
        sent = self._threads.submit(self._transfers.put_part, self._path, self._upload, self._number, data, self._stop)
        self._on_their_way[sent] = self._part
        self._number += 1

    def _next_part(self) -> bytearray:
        """Memory for the next part, which is that of a part that has arrived, where possible."""
        size, idle = part_bytes(self._number, self._size_hint), None
        while self._on_their_way and sum(map(len, self._on_their_way.values())) + size > BUFFERED_BYTES:
            idle = self._reap()
        return idle if idle is not None and len(idle) == size else bytearray(size)

    def _reap(self) -> bytearray:
        """Wait for a part; the memory it took."""
        arrived = wait(self._on_their_way, return_when=FIRST_COMPLETED).done.pop()
        self._sent.append(arrived.result())
        return self._on_their_way.pop(arrived)

    def _complete(self, upload: str) -> None:
        self._committing = True
        parts = sorted(self._sent, key=lambda part: int(part["PartNumber"]))
        try:
            self._transfers.complete(self._path, upload, parts)
        except Exception:
            # The upload was completed and the reply lost: to complete it again is an error on some servers.
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            return bool(self._fs.size(self._path) == self._bytes)
        except Exception:
            return False
