"""One large object to S3: parts of it go up side by side, from as much memory as is stated here."""

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
"""The least: S3 gives a single request some 90 MB/s whatever its size, and takes no parts below 5 MiB."""
BUFFERED_BYTES = 96 << 20
"""Of one writer."""
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
    """A multipart upload, or a single PUT if all fits into one part. Only buffers that may change are copied."""

    def __init__(
        self, fs: Any, transfers: Transfers, path: str, url: str, size_hint: int, buffered_bytes: int = BUFFERED_BYTES
    ) -> None:
        """Nothing is sent before the first part is full. path: in the file system `fs`; url: for messages.

        buffered_bytes: in the part being filled and in those on their way; one part of each, if these are larger.
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
        self._on_their_way: dict[Future[dict[str, Any]], UploadPart] = {}
        self._sent: list[dict[str, Any]] = []
        self._committing = False
        self._stop = threading.Event()
        self._busy = BusyTime()
        threads = max(1, buffered_bytes // self._part.room - 1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-upload-part")

    @property
    def busy_s(self) -> float:
        """While parts were on their way."""
        return self._busy.seconds

    def write(self, data: Buffer) -> None:
        """Add to parts, and send them; waits while as much as may be is on its way."""
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
        """Send the part, once there is memory for the next one; begin that."""
        if self._upload is None:
            self._upload = self._transfers.begin(self._path)
        part, number = self._part, self._part.number + 1
        self._part = UploadPart(number, part_bytes(number, self._size_hint))
        sent = self._threads.submit(self._put, self._upload, part)
        self._on_their_way[sent] = part
        while self._on_their_way and self._held() + self._part.room > self._buffered_bytes:
            self._reap()

    def _held(self) -> int:
        return sum(map(len, self._on_their_way.values()))

    def _put(self, upload: str, part: UploadPart) -> dict[str, Any]:
        with self._busy:
            return self._transfers.put_part(self._path, upload, part, self._stop)

    def _reap(self) -> None:
        """Wait until one of the parts has arrived."""
        for arrived in wait(self._on_their_way, return_when=FIRST_COMPLETED).done:
            del self._on_their_way[arrived]
            self._sent.append(arrived.result())

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
