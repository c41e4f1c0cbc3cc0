"""Zero-copy transfers of bulk bytes to and from an object store.

The service's fsspec library authorizes a request and urllib3 moves the bytes, because s3fs copies and hashes every byte
in one event loop (docs/decisions/0020 has the measurement). The library transfers the bytes itself where that does not
work: customer keys, proxies, buckets in another region.
"""

from __future__ import annotations

import errno
import logging
import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, SSLError

from ckptstore.retry import outage_pauses, pauses, retry
from ckptstore.stores.remote import read_range

logger = logging.getLogger(__name__)

_TRIES = 6
_FIRST_PAUSE_S = 0.1
_CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60
SIGNED_FOR_S = 3600
_CONNECTIONS = 64

_MAX_REPLY_BYTES = 1 << 16
_PARTIAL, _MULTIPLE_CHOICES, _MISSING, _NOTHING_THERE, _FULL = 206, 300, 404, 416, 507
_TRANSIENT = (408, 429, 500, 502, 503, 504)
# The service received other bytes than were sent.
_TRANSIENT_CODES = ("BadDigest", "IncompleteBody", "Md5Mismatch", "RequestTimeout", "XAmzContentChecksumMismatch")
_FULL_CODES = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded")

_T = TypeVar("_T")
Addressed = tuple[str, dict[str, str]]
"""The URL of a request, or the query of one, and its headers."""
PartEntry = dict[str, Any]
"""A part as `Transfers.complete` needs it: PartNumber, ETag, and a checksum if the service asks for it again."""


class TransferFailed(OSError):
    """A transient error: the same request may succeed if it is sent again."""


class RequestRefused(OSError):
    """The service rejects this request."""

    status = 0


@dataclass
class UploadPart:
    """A part of an upload. It holds references to its bytes, not copies."""

    number: int
    unused: int
    """Bytes that still fit."""
    pieces: list[memoryview] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def take(self, data: memoryview) -> memoryview:
        """Add the bytes that fit; returns the rest."""
        piece = data[: self.unused]
        self.pieces.append(piece)
        self.unused -= len(piece)
        return data[len(piece) :]


class Transfers(ABC):
    """Ranged reads and upload parts. Parts are sent with a checksum, which the service verifies if it supports them.

    All methods may be called from any thread. They retry transient errors, then raise OSError or HTTPError.
    """

    suitable = True
    """False once requests without the library are known not to work."""

    def __init__(
        self,
        fs: Any,
        retried: bool,
        proxy: str | None = None,
        connect_s: float = _CONNECT_TIMEOUT_S,
        read_s: float = READ_TIMEOUT_S,
        **options: Any,
    ) -> None:
        """fs: a file system of the library. retried: the caller repeats requests, so one that timed out is not sent
        again here. A range that broke off is resumed in any case: the caller would read it from its beginning.

        connect_s, read_s: timeouts. options: of the connections.
        """
        self.fs = fs
        self._lock = threading.Lock()
        self._limit_s = read_s if retried else math.inf
        timeout = urllib3.Timeout(connect=connect_s, read=read_s)
        options |= {"maxsize": _CONNECTIONS, "retries": False, "timeout": timeout}
        self._connections = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)

    @abstractmethod
    def _readable(self, path: str) -> Addressed:
        """URL and headers of a GET."""

    @abstractmethod
    def begin(self, path: str) -> str:
        """Start an upload; returns its id."""

    @abstractmethod
    def put_part(self, path: str, upload: str, part: UploadPart, stop: threading.Event, retry_s: float) -> PartEntry:
        """Upload a part; returns its entry for `complete`. stop: no more retries once it is set.

        retry_s: see `sent`.
        """

    @abstractmethod
    def complete(self, path: str, upload: str, parts: list[PartEntry]) -> None:
        """Join all parts into one object."""

    def abort(self, path: str, upload: str) -> None:  # noqa: B027 - Azure has no such request
        """Free all parts of an upload; one that has ended is ignored. Here: left to the service."""

    def read(self, path: str) -> bytes:
        """A whole small object."""
        return self.sent(lambda: self.ask("GET", *self._readable(path)).data, lambda: bytes(self.fs.cat_file(path)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` of an object; returns the number of bytes before its end."""
        with closing(ByteSpan(self, path, offset, offset + len(buffer))) as span:
            return span.read(buffer)

    def ask(self, method: str, url: str, headers: Mapping[str, str], body: Any = None) -> BaseHTTPResponse:
        """The reply to one request, with its body as it was sent. Raises the error of a reply that refuses.

        body: bytes, or pieces that are sent one by one without a copy.
        """
        reply = self._connections.request(method, url, body=body, headers=headers, decode_content=False)
        if reply.status >= _MULTIPLE_CHOICES:
            raise refusal(reply.status, reply.data)
        return reply

    def get(self, path: str, offset: int, num_bytes: int) -> BaseHTTPResponse | None:
        """The reply to one ranged request: its length is known, its body is unread. None if the range is empty."""
        url, headers = self._readable(path)
        wanted = {**headers, "Range": f"bytes={offset}-{offset + num_bytes - 1}"}
        reply = self._connections.request("GET", url, headers=wanted, preload_content=False, decode_content=False)
        if reply.status == _PARTIAL and "Content-Length" in reply.headers:
            return reply
        body = reply.read(_MAX_REPLY_BYTES)
        reply.close()
        if reply.status == _PARTIAL:
            raise RequestRefused("the service does not send the length of a range")
        if reply.status == _NOTHING_THERE:
            return None
        raise refusal(reply.status, body)

    def sent(
        self,
        request: Callable[[], _T],
        by_library: Callable[[], _T] | None = None,
        stop: threading.Event | None = None,
        retry_s: float = 0.0,
    ) -> _T:
        """The result of a request, with retries. If the service refuses it and the library succeeds, the library makes
        all further transfers. retry_s: how long to retry at most; 0: a few times.
        """
        if by_library is not None and not self.suitable:
            return by_library()
        waits = outage_pauses(retry_s) if retry_s else pauses(_FIRST_PAUSE_S, tries=_TRIES, timeout_s=self._limit_s)
        try:
            return retry(
                request,
                (HTTPError, TransferFailed),
                waits,
                unless=lambda error: isinstance(error, SSLError),
                sleep=(stop or threading.Event()).wait,
            )
        except (RequestRefused, SSLError) as error:
            if by_library is None:
                raise
            result = by_library()
            with self._lock:
                if self.suitable:
                    library = type(self.fs).__module__.partition(".")[0]
                    logger.warning("%s makes all transfers, which is slower: %s", library, error)
                self.suitable = False
            return result


@dataclass
class ByteSpan:
    """A range of an object, streamed over one connection and resumed over another if it breaks off.

    For sequential reads in one thread. Sends no request before the first one.
    """

    _transfers: Transfers
    _path: str
    at: int
    """Offset of the next byte."""
    end: int
    _reply: BaseHTTPResponse | None = None

    def read(self, buffer: memoryview) -> int:
        """Fill the buffer with the next bytes; returns their number, short only at the object's end."""
        began = self.at
        self._transfers.sent(
            lambda: self._read_on(buffer[self.at - began :]), lambda: self._read_by_library(buffer[self.at - began :])
        )
        return self.at - began

    def close(self) -> None:
        """Return the connection to the pool; close it if the reply has not been read completely."""
        reply, self._reply = self._reply, None
        if reply is not None:
            if self.at < self.end:
                reply.close()
            reply.release_conn()

    def _read_on(self, buffer: memoryview) -> None:
        try:
            if self._reply is None and self.at < self.end:
                self._reply = self._transfers.get(self._path, self.at, self.end - self.at)
                self.end = self.at + (int(self._reply.headers["Content-Length"]) if self._reply is not None else 0)
            while len(buffer) and self.at < self.end:
                count = _receive(self._reply, buffer)
                buffer = buffer[count:]
                self.at += count
        except BaseException:
            self.close()
            raise

    def _read_by_library(self, buffer: memoryview) -> None:
        self.close()
        self.at += read_range(self._transfers.fs, self._path, self.at, buffer)


def _receive(reply: Any, buffer: memoryview) -> int:
    """Read from the socket into the buffer; returns the number of bytes, at least one."""
    try:
        # urllib3's own readinto copies to bytes first, which costs half as much again.
        count = int(reply._fp.readinto(buffer))
    except (OSError, HTTPException) as error:
        raise TransferFailed(f"the reply broke off: {type(error).__name__}: {error}") from error
    if not count:
        raise TransferFailed("the reply ended early")
    return count


def proxy_of(endpoint: str | None) -> str | None:
    """The proxy that the environment sets for this endpoint."""
    where = urlsplit(endpoint or "https://")
    proxies = getproxies()
    bypassed = where.netloc and proxy_bypass(where.netloc)
    return None if bypassed else proxies.get(where.scheme) or proxies.get("all")


def refusal(status: int, body: bytes) -> OSError:
    """The error of a reply. Only its code and message are repeated: the rest may contain the signed request."""
    code, message = (element(name, body) for name in ("Code", "Message"))
    text = f"the service answered {status} {code}: {message}".rstrip(": ")
    if status in _TRANSIENT or code in _TRANSIENT_CODES:
        return TransferFailed(text)
    if status == _FULL or code in _FULL_CODES:
        return OSError(errno.ENOSPC, text)
    if status == _MISSING:
        return FileNotFoundError(errno.ENOENT, text)
    error = RequestRefused(text)
    error.status = status
    return error


def element(name: str, body: bytes) -> str:
    """The text of an element of XML; empty if it is not there."""
    found = re.search(rf"<{name}>([^<]*)</{name}>", body.decode(errors="replace"))
    return found[1] if found else ""
