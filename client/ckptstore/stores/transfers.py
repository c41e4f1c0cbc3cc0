"""Bulk bytes to and from an S3 service, straight from memory and into memory.

s3fs signs a URL, and urllib3 moves the bytes over one of its connections: s3fs' own transfers copy and hash every
byte in one event loop (docs/decisions/0020 has the measurement). What a signed URL cannot do, s3fs does itself:
customer keys, proxies, buckets in another region.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import re
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

import urllib3
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, SSLError

from ckptstore.retry import pauses, retry

try:
    from isal.isal_zlib import crc32
except ImportError:  # the same, at a quarter of the speed
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
# What arrived is not what was sent.
_TRANSIENT_CODES = ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch")
_FULL_CODES = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded")

_T = TypeVar("_T")


class TransferFailed(OSError):
    """The same request may well succeed if it is sent again."""


class SignatureRefused(OSError):
    """The service does not take a signed URL for this."""


class UploadPart:
    """A part of an upload, which is filled, sent and forgotten. It refers to the bytes it is made of."""

    def __init__(self, number: int, room: int) -> None:
        self.number = number
        self.room = room
        """Bytes it still takes."""
        self.pieces: list[memoryview] = []

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def take(self, data: memoryview) -> memoryview:
        """Take what there is room for, and return the rest."""
        piece = data[: self.room]
        self.pieces.append(piece)
        self.room -= len(piece)
        return data[len(piece) :]

    def crc32(self) -> str:
        """As S3 spells it."""
        crc = 0
        for piece in self.pieces:
            crc = crc32(piece, crc)
        return base64.b64encode(crc.to_bytes(4, "big")).decode()


class Transfers:
    """Ranged reads, and parts of uploads, which are sent with a checksum that the service compares, if it knows how.

    All methods may be called from any thread. They try again, and then raise OSError or HTTPError.
    """

    def __init__(self, fs: Any) -> None:
        """fs: an s3fs.S3FileSystem."""
        self._fs = fs
        self._lock = threading.Lock()
        config = {"connect_timeout": fs.connect_timeout, "read_timeout": _READ_TIMEOUT_S, **fs.config_kwargs}
        verify = fs.client_kwargs.get("verify", True)
        # Whether signed URLs are known to do, or not known not to.
        self.suitable = verify is not False and not config.get("proxies") and not _proxied(fs.endpoint_url)
        if not self.suitable:
            logger.info("s3fs does all transfers, which is slower: a proxy, or no certificates, are asked for")
        self._checksums = config.get("request_checksum_calculation") != "when_required"
        self._connections = urllib3.PoolManager(
            maxsize=_CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=config["connect_timeout"], read=config["read_timeout"]),
            ca_certs=verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE"),
        )

    def read(self, path: str) -> bytes:
        """A whole object, which should be small."""

        def request() -> bytes:
            reply = self._connections.request("GET", self._fs.url(path, expires=_SIGNED_FOR_S), decode_content=False)
            if reply.status != _OK:
                raise _refusal(reply.status, reply.data)
            return reply.data

        return self.signed(request, lambda: bytes(self._fs.cat_file(path)))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` of an object; returns how many bytes there were."""
        with self.open(path, offset, len(buffer)) as stretch:
            return stretch.read(buffer)

    def open(self, path: str, offset: int, num_bytes: int) -> ByteSpan:
        """So many bytes of an object, to be read from front to back by one thread. Nothing is asked for yet."""
        return ByteSpan(self, path, offset, num_bytes)

    def begin(self, path: str) -> str:
        """The id of a new upload."""
        checksum = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        return str(self._call("create_multipart_upload", path, **checksum)["UploadId"])

    def put_part(self, path: str, upload: str, part: UploadPart, stop: threading.Event) -> dict[str, Any]:
        """Upload a part; returns what `complete` needs to know of it. stop: try no more once it is set."""
        parameters: dict[str, Any] = {"UploadId": upload, "PartNumber": part.number}
        if self._checksums:
            parameters["ChecksumCRC32"] = part.crc32()
        return self.signed(
            lambda: self._put_part(path, parameters, part),
            lambda: self._put_part_by_s3fs(path, parameters, part),
            stop,
        )

    def complete(self, path: str, upload: str, parts: list[dict[str, Any]]) -> None:
        """Make one object of all parts."""
        self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})

    def abort(self, path: str, upload: str) -> None:
        """Free all parts of an upload; one that is over is fine."""
        try:
            self._call("abort_multipart_upload", path, UploadId=upload)
        except FileNotFoundError:
            pass

    def get(self, path: str, offset: int, num_bytes: int) -> BaseHTTPResponse | None:
        """The reply to one ranged request, its length told and its body still to be read; None if nothing is there."""
        url = self._fs.url(path, expires=_SIGNED_FOR_S)
        wanted = {"Range": f"bytes={offset}-{offset + num_bytes - 1}"}
        reply = self._connections.request("GET", url, headers=wanted, preload_content=False, decode_content=False)
        if reply.status == _PARTIAL and "Content-Length" in reply.headers:
            return reply
        body = reply.read(_MAX_REPLY_BYTES)
        reply.close()
        if reply.status == _PARTIAL:
            raise SignatureRefused("the service does not tell how long a part of an object is")
        if reply.status == _NOTHING_THERE:
            return None
        raise _refusal(reply.status, body)

    def _put_part(self, path: str, parameters: dict[str, Any], part: UploadPart) -> dict[str, Any]:
        url = self._fs.url(path, expires=_SIGNED_FOR_S, client_method="upload_part", **parameters)
        headers = {"Content-Length": str(len(part))}
        crc = parameters.get("ChecksumCRC32")
        if crc is not None:
            headers[_CHECKSUM] = crc
        pieces: Any = part.pieces  # sent one by one, as they are; urllib3's annotation knows of bytes only
        reply = self._connections.request("PUT", url, body=pieces, headers=headers)
        if reply.status != _OK:
            raise _refusal(reply.status, reply.data)
        done = {"PartNumber": parameters["PartNumber"], "ETag": reply.headers["ETag"]}
        # A service that repeats the checksum has compared it, and wants to hear it again.
        return {**done, "ChecksumCRC32": crc} if crc and reply.headers.get(_CHECKSUM) == crc else done

    def read_by_s3fs(self, path: str, offset: int, buffer: memoryview) -> int:
        """As read_into, without a signed URL."""
        try:
            data = self._fs.cat_file(path, start=offset, end=offset + len(buffer))
        except OSError as error:
            # 416, nothing at this offset, arrives as EINVAL, like any other bad request.
            if error.errno == errno.EINVAL and self._fs.size(path) <= offset:
                return 0
            raise
        buffer[: len(data)] = data
        return len(data)

    def _put_part_by_s3fs(self, path: str, parameters: dict[str, Any], part: UploadPart) -> dict[str, Any]:
        reply = self._call("upload_part", path, Body=b"".join(part.pieces), **parameters)
        told = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
        return {"PartNumber": part.number, **told}

    def signed(self, request: Callable[[], _T], by_s3fs: Callable[[], _T], stop: threading.Event | None = None) -> _T:
        """What a request by a signed URL returns, tried again; or s3fs, which is asked from then on if it can do it."""
        if not self.suitable:
            return by_s3fs()
        try:
            return _try(request, stop or threading.Event())
        except (SignatureRefused, SSLError) as error:
            result = by_s3fs()
            with self._lock:
                if self.suitable:
                    logger.warning("signed URLs are refused, so s3fs does all transfers, which is slower: %s", error)
                self.suitable = False
            return result

    def _call(self, method: str, path: str, **parameters: Any) -> Any:
        bucket, key, _ = self._fs.split_path(path)
        return self._fs.call_s3(method, Bucket=bucket, Key=key, **parameters)


class ByteSpan:
    """Bytes of an object that come over one connection, straight on; another one if it breaks off."""

    def __init__(self, transfers: Transfers, path: str, offset: int, num_bytes: int) -> None:
        self.at = offset
        """Of the byte that is read next."""
        self.end = offset + num_bytes
        self._transfers = transfers
        self._path = path
        self._reply: BaseHTTPResponse | None = None

    def __enter__(self) -> ByteSpan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, buffer: memoryview) -> int:
        """Fill the buffer with what comes next; returns how many bytes there were before the object's end."""
        began = self.at
        self._transfers.signed(
            lambda: self._read_on(buffer[self.at - began :]), lambda: self._read_by_s3fs(buffer[self.at - began :])
        )
        return self.at - began

    def close(self) -> None:
        """Give the connection back, unless more is coming over it."""
        reply, self._reply = self._reply, None
        if reply is not None:
            if self.at < self.end:
                reply.close()
            reply.release_conn()

    def _read_on(self, buffer: memoryview) -> None:
        done = 0
        try:
            if self._reply is None and self.at < self.end:
                self._request()
            while done < len(buffer) and self.at < self.end:
                assert self._reply is not None
                count = _receive(self._reply, buffer[done:])
                done += count
                self.at += count
        except BaseException:
            self.close()
            raise

    def _request(self) -> None:
        self._reply = self._transfers.get(self._path, self.at, self.end - self.at)
        self.end = self.at if self._reply is None else self.at + int(self._reply.headers["Content-Length"])

    def _read_by_s3fs(self, buffer: memoryview) -> None:
        self.close()
        self.at += self._transfers.read_by_s3fs(self._path, self.at, buffer)


def _receive(reply: Any, buffer: memoryview) -> int:
    """Take what comes next, from the socket into the buffer. Returns how many bytes, at least one."""
    try:
        # urllib3's own readinto makes bytes of it first, which costs half as much again.
        count = int(reply._fp.readinto(buffer))
    except (OSError, HTTPException) as error:
        raise TransferFailed(f"the reply broke off: {type(error).__name__}: {error}") from error
    if not count:
        raise TransferFailed("the reply ended early")
    return count


def _proxied(endpoint: str | None) -> bool:
    """Whether the environment wants a proxy to be asked."""
    host = urlsplit(endpoint).netloc if endpoint else ""
    wanted = {"http", "https", "all"} & set(urllib.request.getproxies())
    return bool(wanted) and not (host and urllib.request.proxy_bypass(host))


def _try(request: Callable[[], _T], stop: threading.Event) -> _T:
    """The request's result, retried after transient errors until `stop` is set."""
    waits = pauses(_FIRST_PAUSE_S, tries=_TRIES)
    return retry(request, (HTTPError, TransferFailed), waits, unless=SSLError, sleep=stop.wait)


def _refusal(status: int, body: bytes) -> OSError:
    """The error that a reply tells. Only its code and message are repeated: the rest may hold what was signed."""
    code, message = (_element(name, body) for name in ("Code", "Message"))
    told = f"the service answered {status} {code}: {message}".rstrip(": ")
    if status in _TRANSIENT or code in _TRANSIENT_CODES:
        return TransferFailed(told)
    if status == _FULL or code in _FULL_CODES:
        return OSError(errno.ENOSPC, told)
    if status == _MISSING:
        return FileNotFoundError(errno.ENOENT, told)
    return SignatureRefused(told)


def _element(name: str, body: bytes) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body.decode(errors="replace"))
    return found[1] if found else ""
