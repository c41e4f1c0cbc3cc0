"""Zero-copy transfers of bulk bytes to and from an S3 service.

s3fs signs a URL and urllib3 moves the bytes, because s3fs copies and hashes every byte in one event loop
(docs/decisions/0020 has the measurement). s3fs transfers the bytes itself where signed URLs do not work: customer keys,
proxies, buckets in another region.
"""

from __future__ import annotations

import base64
import errno
import logging
import math
import os
import re
import threading
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

import urllib3
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, SSLError

from ckptstore.retry import outage_pauses, pauses, retry
from ckptstore.stores.remote import read_range

try:
    from isal.isal_zlib import crc32
except ImportError:  # the same result at a quarter of the speed
    from zlib import crc32

logger = logging.getLogger(__name__)

_TRIES = 6
_FIRST_PAUSE_S = 0.1
_SIGNED_FOR_S = 3600
_READ_TIMEOUT_S = 60
_CONNECTIONS = 64

_CHECKSUM = "x-amz-checksum-crc32"
_MAX_REPLY_BYTES = 1 << 16
_OK, _PARTIAL, _MISSING, _NOTHING_THERE, _FULL = 200, 206, 404, 416, 507
_TRANSIENT = (408, 429, 500, 502, 503, 504)
# The service received other bytes than were sent.
_TRANSIENT_CODES = ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch")
_FULL_CODES = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded")

_T = TypeVar("_T")


class TransferFailed(OSError):
    """A transient error: the same request may succeed if it is sent again."""


class SignatureRefused(OSError):
    """The service rejects a signed URL for this request."""


@dataclass
class UploadPart:
    """A part of an upload. It holds references to its bytes, not copies."""

    number: int
    room: int
    """Bytes that still fit."""
    pieces: list[memoryview] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def take(self, data: memoryview) -> memoryview:
        """Add the bytes that fit; returns the rest."""
        piece = data[: self.room]
        self.pieces.append(piece)
        self.room -= len(piece)
        return data[len(piece) :]

    def crc32(self) -> str:
        """The checksum in S3's encoding, base64."""
        crc = 0
        for piece in self.pieces:
            crc = crc32(piece, crc)
        return base64.b64encode(crc.to_bytes(4, "big")).decode()


class Transfers:
    """Ranged reads and upload parts. Parts are sent with a checksum, which the service verifies if it supports them.

    All methods may be called from any thread. They retry transient errors, then raise OSError or HTTPError.
    """

    def __init__(self, fs: Any, retried: bool) -> None:
        """fs: an s3fs.S3FileSystem. retried: the caller repeats requests, so one that timed out is not sent again here.

        A range that broke off is resumed in any case: the caller would read it from its beginning.
        """
        self.fs = fs
        self._lock = threading.Lock()
        config = {"connect_timeout": fs.connect_timeout, "read_timeout": _READ_TIMEOUT_S, **fs.config_kwargs}
        verify = fs.client_kwargs.get("verify", True)
        # False once signed URLs are known not to work.
        self.suitable = verify is not False and not config.get("proxies") and not _proxied(fs.endpoint_url)
        if not self.suitable:
            logger.info("s3fs makes all transfers, which is slower: a proxy is set, or certificates are not verified")
        self._checksums = config.get("request_checksum_calculation") != "when_required"
        self._limit_s = config["read_timeout"] if retried else math.inf
        self._connections = urllib3.PoolManager(
            maxsize=_CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=config["connect_timeout"], read=config["read_timeout"]),
            ca_certs=verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE"),
        )

    def read(self, path: str) -> bytes:
        """A whole small object."""

        def request() -> bytes:
            reply = self._connections.request("GET", self.fs.url(path, expires=_SIGNED_FOR_S), decode_content=False)
            if reply.status != _OK:
                raise _refusal(reply.status, reply.data)
            return reply.data

        return self.signed(request, lambda: bytes(self.fs.cat_file(path)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` of an object; returns the number of bytes before its end."""
        with closing(ByteSpan(self, path, offset, offset + len(buffer))) as span:
            return span.read(buffer)

    def begin(self, path: str) -> str:
        """Start an upload; returns its id."""
        checksum = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        return str(self._call("create_multipart_upload", path, **checksum)["UploadId"])

    def put_part(
        self, path: str, upload: str, part: UploadPart, stop: threading.Event, retry_s: float
    ) -> dict[str, Any]:
        """Upload a part; returns its entry for `complete`. stop: no more retries once it is set.

        retry_s: see `signed`.
        """
        parameters: dict[str, Any] = {"UploadId": upload, "PartNumber": part.number}
        if self._checksums:
            parameters["ChecksumCRC32"] = part.crc32()
        return self.signed(
            lambda: self._put_part(path, parameters, part),
            lambda: self._put_part_by_s3fs(path, parameters, part),
            stop,
            retry_s,
        )

    def complete(self, path: str, upload: str, parts: list[dict[str, Any]]) -> None:
        """Join all parts into one object."""
        self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})

    def abort(self, path: str, upload: str) -> None:
        """Free all parts of an upload; one that has ended is ignored."""
        try:
            self._call("abort_multipart_upload", path, UploadId=upload)
        except FileNotFoundError:
            pass

    def get(self, path: str, offset: int, num_bytes: int) -> BaseHTTPResponse | None:
        """The reply to one ranged request: its length is known, its body is unread. None if the range is empty."""
        url = self.fs.url(path, expires=_SIGNED_FOR_S)
        wanted = {"Range": f"bytes={offset}-{offset + num_bytes - 1}"}
        reply = self._connections.request("GET", url, headers=wanted, preload_content=False, decode_content=False)
        if reply.status == _PARTIAL and "Content-Length" in reply.headers:
            return reply
        body = reply.read(_MAX_REPLY_BYTES)
        reply.close()
        if reply.status == _PARTIAL:
            raise SignatureRefused("the service does not send the length of a range")
        if reply.status == _NOTHING_THERE:
            return None
        raise _refusal(reply.status, body)

    def _put_part(self, path: str, parameters: dict[str, Any], part: UploadPart) -> dict[str, Any]:
        url = self.fs.url(path, expires=_SIGNED_FOR_S, client_method="upload_part", **parameters)
        headers = {"Content-Length": str(len(part))}
        crc = parameters.get("ChecksumCRC32")
        if crc is not None:
            headers[_CHECKSUM] = crc
        pieces: Any = part.pieces  # sent one by one without a copy; urllib3's annotation allows bytes only
        reply = self._connections.request("PUT", url, body=pieces, headers=headers)
        if reply.status != _OK:
            raise _refusal(reply.status, reply.data)
        done = {"PartNumber": parameters["PartNumber"], "ETag": reply.headers["ETag"]}
        # A service that returns the checksum has verified it, and requires it again at completion.
        return {**done, "ChecksumCRC32": crc} if crc and reply.headers.get(_CHECKSUM) == crc else done

    def _put_part_by_s3fs(self, path: str, parameters: dict[str, Any], part: UploadPart) -> dict[str, Any]:
        reply = self._call("upload_part", path, Body=b"".join(part.pieces), **parameters)
        fields = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
        return {"PartNumber": part.number, **fields}

    def signed(
        self,
        request: Callable[[], _T],
        by_s3fs: Callable[[], _T],
        stop: threading.Event | None = None,
        retry_s: float = 0.0,
    ) -> _T:
        """The result of a request by signed URL, with retries. If signed URLs are rejected and s3fs succeeds, s3fs
        makes all further requests. retry_s: how long to retry at most; 0: a few times.
        """
        if not self.suitable:
            return by_s3fs()
        waits = outage_pauses(retry_s) if retry_s else pauses(_FIRST_PAUSE_S, tries=_TRIES, timeout_s=self._limit_s)
        try:
            return retry(
                request,
                (HTTPError, TransferFailed),
                waits,
                unless=lambda error: isinstance(error, SSLError),
                sleep=(stop or threading.Event()).wait,
            )
        except (SignatureRefused, SSLError) as error:
            result = by_s3fs()
            with self._lock:
                if self.suitable:
                    logger.warning("signed URLs are rejected, so s3fs makes all transfers, which is slower: %s", error)
                self.suitable = False
            return result

    def _call(self, method: str, path: str, **parameters: Any) -> Any:
        bucket, key, _ = self.fs.split_path(path)
        return self.fs.call_s3(method, Bucket=bucket, Key=key, **parameters)


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
        self._transfers.signed(
            lambda: self._read_on(buffer[self.at - began :]), lambda: self._read_by_s3fs(buffer[self.at - began :])
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
        done = 0
        try:
            if self._reply is None and self.at < self.end:
                self._reply = self._transfers.get(self._path, self.at, self.end - self.at)
                self.end = self.at + (int(self._reply.headers["Content-Length"]) if self._reply is not None else 0)
            while done < len(buffer) and self.at < self.end:
                assert self._reply is not None
                count = _receive(self._reply, buffer[done:])
                done += count
                self.at += count
        except BaseException:
            self.close()
            raise

    def _read_by_s3fs(self, buffer: memoryview) -> None:
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


def _proxied(endpoint: str | None) -> bool:
    """Whether the environment sets a proxy for this endpoint."""
    host = urlsplit(endpoint).netloc if endpoint else ""
    wanted = {"http", "https", "all"} & set(urllib.request.getproxies())
    return bool(wanted) and not (host and urllib.request.proxy_bypass(host))


def _refusal(status: int, body: bytes) -> OSError:
    """The error of a reply. Only its code and message are repeated: the rest may contain the signed request."""
    code, message = (_element(name, body) for name in ("Code", "Message"))
    text = f"the service answered {status} {code}: {message}".rstrip(": ")
    if status in _TRANSIENT or code in _TRANSIENT_CODES:
        return TransferFailed(text)
    if status == _FULL or code in _FULL_CODES:
        return OSError(errno.ENOSPC, text)
    if status == _MISSING:
        return FileNotFoundError(errno.ENOENT, text)
    return SignatureRefused(text)


def _element(name: str, body: bytes) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body.decode(errors="replace"))
    return found[1] if found else ""
