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
import random
import re
import threading
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import urllib3
from urllib3.exceptions import HTTPError, SSLError

logger = logging.getLogger(__name__)

_TRIES = 6
_FIRST_PAUSE_S = 0.1
_SIGNED_FOR_S = 3600
_READ_TIMEOUT_S = 60
_CONNECTIONS = 64
_PIECE_BYTES = 128 << 10
"""Copied at a time on their way into the caller's memory, while they are in the processor's cache."""

_CHECKSUM = "x-amz-checksum-crc32"
_MAX_REPLY_BYTES = 1 << 16
_OK, _PARTIAL, _MISSING, _NOTHING_THERE, _FULL = 200, 206, 404, 416, 507
_TRANSIENT = (408, 429, 500, 502, 503, 504)
# What arrived is not what was sent.
_TRANSIENT_CODES = ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch")
_FULL_CODES = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded")

_T = TypeVar("_T")


class _Again(OSError):
    """The same request may well succeed if it is sent again."""


class _Unsuitable(OSError):
    """The service does not take a signed URL for this."""


class Part:
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
            crc = zlib.crc32(piece, crc)
        return base64.b64encode(crc.to_bytes(4, "big")).decode()


class Transfers:
    """Ranged reads, and parts of uploads, which are sent with a checksum that the service compares, if it knows how.

    All methods may be called from any thread. They try again, and then raise OSError or HTTPError.
    """

    def __init__(self, fs: Any) -> None:
        """fs: an s3fs.S3FileSystem."""
        self._fs = fs
        config = {"connect_timeout": fs.connect_timeout, "read_timeout": _READ_TIMEOUT_S, **fs.config_kwargs}
        verify = fs.client_kwargs.get("verify", True)
        self._suitable = verify is not False and not (config.get("proxies") or urllib.request.getproxies())
        self._checksums = config.get("request_checksum_calculation") != "when_required"
        self._connections = urllib3.PoolManager(
            maxsize=_CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=config["connect_timeout"], read=config["read_timeout"]),
            ca_certs=verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE"),
        )

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` of an object; returns how many bytes there were."""
        done = 0

        def read_on() -> None:
            nonlocal done
            for count in self._read(path, offset + done, buffer[done:]):
                done += count

        if self._suitable:
            try:
                _try(read_on)
                return done
            except (_Unsuitable, SSLError) as error:
                done += self._read_by_s3fs(path, offset + done, buffer[done:])
                self._sign_no_more(error)
                return done
        return self._read_by_s3fs(path, offset, buffer)

    def begin(self, path: str) -> str:
        """The id of a new upload."""
        checksum = {"ChecksumAlgorithm": "CRC32"} if self._checksums else {}
        return str(self._call("create_multipart_upload", path, **checksum)["UploadId"])

    def put_part(self, path: str, upload: str, part: Part, stop: threading.Event) -> dict[str, Any]:
        """Upload a part; returns what `complete` needs to know of it. stop: try no more once it is set."""
        parameters: dict[str, Any] = {"UploadId": upload, "PartNumber": part.number}
        if self._checksums:
            parameters["ChecksumCRC32"] = part.crc32()
        if self._suitable:
            try:
                return _try(lambda: self._put_part(path, parameters, part), stop)
            except (_Unsuitable, SSLError) as error:
                done = self._put_part_by_s3fs(path, parameters, part)
                self._sign_no_more(error)
                return done
        return self._put_part_by_s3fs(path, parameters, part)

    def complete(self, path: str, upload: str, parts: list[dict[str, Any]]) -> None:
        """Make one object of all parts."""
        self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})

    def abort(self, path: str, upload: str) -> None:
        """Free all parts of an upload; one that is over is fine."""
        try:
            self._call("abort_multipart_upload", path, UploadId=upload)
        except FileNotFoundError:
            pass

    def _read(self, path: str, offset: int, buffer: memoryview) -> Iterator[int]:
        """One request; yields the size of each piece once it is in the buffer."""
        url = self._fs.url(path, expires=_SIGNED_FOR_S)
        wanted = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        reply = self._connections.request("GET", url, headers=wanted, preload_content=False, decode_content=False)
        try:
            if reply.status != _PARTIAL:
                body = reply.read(_MAX_REPLY_BYTES)
                if reply.status == _NOTHING_THERE:
                    return
                raise _refusal(reply.status, body)
            expected, done = int(reply.headers["Content-Length"]), 0
            while done < expected:
                piece = reply.read(min(_PIECE_BYTES, expected - done))
                if not piece:
                    raise _Again(errno.EIO, "the reply ended early")
                buffer[done : done + len(piece)] = piece
                done += len(piece)
                yield len(piece)
        except BaseException:
            reply.close()  # the rest of the reply is of no use to the next request
            raise
        finally:
            reply.release_conn()

    def _put_part(self, path: str, parameters: dict[str, Any], part: Part) -> dict[str, Any]:
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

    def _read_by_s3fs(self, path: str, offset: int, buffer: memoryview) -> int:
        try:
            data = self._fs.cat_file(path, start=offset, end=offset + len(buffer))
        except OSError as error:
            # 416, nothing at this offset, arrives as EINVAL, like any other bad request.
            if error.errno == errno.EINVAL and self._fs.size(path) <= offset:
                return 0
            raise
        buffer[: len(data)] = data
        return len(data)

    def _put_part_by_s3fs(self, path: str, parameters: dict[str, Any], part: Part) -> dict[str, Any]:
        reply = self._call("upload_part", path, Body=b"".join(part.pieces), **parameters)
        told = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
        return {"PartNumber": part.number, **told}

    def _sign_no_more(self, error: Exception) -> None:
        """What failed with a signed URL has just succeeded without."""
        logger.warning("signed URLs are refused, so transfers go through s3fs, which is slower: %s", error)
        self._suitable = False

    def _call(self, method: str, path: str, **parameters: Any) -> Any:
        bucket, key, _ = self._fs.split_path(path)
        return self._fs.call_s3(method, Bucket=bucket, Key=key, **parameters)


def _try(request: Callable[[], _T], stop: threading.Event | None = None) -> _T:
    """What a request returns or raises, once that is not merely bad luck."""
    stop = stop or threading.Event()
    pause = _FIRST_PAUSE_S
    for _ in range(_TRIES - 1):
        try:
            return request()
        except SSLError:
            raise
        except (HTTPError, _Again) as error:
            # Requests that failed together should not come back together.
            if stop.wait(random.uniform(pause / 2, pause)):
                raise
            logger.info("trying again: %s", error)
        pause *= 2
    return request()


def _refusal(status: int, body: bytes) -> OSError:
    """The error that a reply tells. Only its code and message are repeated: the rest may hold what was signed."""
    code, message = (_element(name, body) for name in ("Code", "Message"))
    told = f"the service answered {status} {code}: {message}".rstrip(": ")
    if status in _TRANSIENT or code in _TRANSIENT_CODES:
        return _Again(errno.EBUSY, told)
    if status == _FULL or code in _FULL_CODES:
        return OSError(errno.ENOSPC, told)
    if status == _MISSING:
        return FileNotFoundError(errno.ENOENT, told)
    return _Unsuitable(errno.EINVAL, told)


def _element(name: str, body: bytes) -> str:
    found = re.search(rf"<{name}>([^<]*)</{name}>", body.decode(errors="replace"))
    return found[1] if found else ""
