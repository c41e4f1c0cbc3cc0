"""The interface of a store, and its errors. All access to file systems and object stores goes through it.

A store must guarantee:
- a key is visible with all of its bytes or not at all, except for objects being written through `open_writer`, whose
  names are unique to an attempt;
- a read or list that begins after a write returned sees that write;
- `put_if_absent` has at most one winner per key, across processes and machines.

Keys are relative, separated by "/", and only made by ckptstore.names. All methods may be called from any thread. They
raise StoreUnavailable, StoreFull, StoreReadOnly and ObjectMissing.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import xxhash
from typing_extensions import override

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import (
    CkptError,
    CorruptObject,
    NoSuchBucket,
    ObjectMissing,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)

_T = TypeVar("_T")

PARALLEL_READS = min(8, max(2, os.cpu_count() or 2))
CACHED_BYTES = 4 << 20
"""Bytes read at once: few enough to stay in the CPU cache until they are hashed, and enough that threads seldom wait
for the interpreter's lock."""
"""Concurrent reads of a store whose reads keep a core busy."""


class ObjectInfo(NamedTuple):
    """One object of a listing."""

    key: str
    bytes: int
    modified_at: float
    """Seconds since the epoch, by the store's clock."""


class ObjectWriter(ABC):
    """Writes one object sequentially. Leaving the `with` block normally makes it durable.

    Leaving it by an exception removes the written bytes. Not for use by several threads at once.
    """

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Append `data`; the caller may reuse the buffer afterwards.

        Bytes and read-only views may be kept without a copy: they must not change until the block is left.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the object durable."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the written bytes; never raises."""

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


@dataclass
class _WholeWriter(ObjectWriter):
    """Collects all bytes, and puts them at the commit."""

    store: Store
    key: str
    data: bytearray = field(default_factory=bytearray)

    def write(self, data: Buffer) -> None:
        self.data += data

    def commit(self) -> None:
        self.store.put(self.key, self.data)

    def abort(self) -> None:
        self.data.clear()


class ObjectReader(ABC):
    """Reads one object, in one thread, until the `with` block is left."""

    small_reads = False
    """Whether reads of a few hundred KiB cost no more per byte than large reads."""

    def expect(self, offset: int, num_bytes: int, again: bool = True) -> None:  # noqa: B027 - most prepare nothing
        """Announce that the next reads are in order within these bytes. Other reads stay allowed.

        again: whether another read of them on this host is likely, so that a cache is worth its cost.
        """

    @abstractmethod
    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`. Raises CorruptObject if the object ends early."""

    def read_hashed(self, offset: int, buffer: memoryview) -> str:
        """`read`, and the xxh3-128 of what was read: each part while it is in the CPU cache."""
        seen = xxhash.xxh3_128()
        for at in range(0, len(buffer), CACHED_BYTES):
            part = buffer[at : at + CACHED_BYTES]
            self.read(offset + at, part)
            seen.update(part)
        return seen.hexdigest()

    def read_parts(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order with the bytes from `offset` on."""
        for buffer in buffers:
            self.read(offset, buffer)
            offset += len(buffer)

    def read_once(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes from `offset`, read-only, of which the caller needs no second read: they are cached nowhere.

        Raises CorruptObject if the object ends early.
        """
        data = memoryview(bytearray(num_bytes))
        self.read(offset, data)
        return data.toreadonly()

    def close(self) -> None:  # noqa: B027 - some hold nothing
        """Release the object."""

    def __enter__(self) -> ObjectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class RangeReader(ObjectReader):
    """A reader that makes one request per read."""

    get_range: Callable[[int, memoryview], None]

    @override
    def read(self, offset: int, buffer: memoryview) -> None:
        self.get_range(offset, buffer)


class Store(ABC):
    """Bytes by key under one root."""

    url: str
    """URL of the root, for people and error messages; never contains credentials."""
    identity: str
    """Equal for stores with the same objects: the URL, and the service that serves it."""
    client: str = ""
    """The library that reaches it, with its version."""
    create_only: str = "a look, then a write"
    """How a create is refused if the object exists."""
    parallel_reads: int = PARALLEL_READS
    """Number of concurrent ranged reads that is fastest."""
    longest_read: int = 0
    """Largest range to read through one open reader, where a large range needs no memory; 0: no preference."""
    retry_s: float = 0.0
    """How long writers repeat requests that fail, where `resumes_uploads`; set by a RetryingStore."""
    resumes_uploads: bool = False
    """A writer repeats the part of an upload that failed; elsewhere the whole object must be written again."""
    shared_between_processes: bool = True
    one_winner: bool | None = None
    """Whether one of several `put_if_absent` of a key wins; None: unknown, so it is probed first (remote_create.py)."""
    listing_lag_s: float = 0.0
    """For how long another host may not see what this one has written."""
    must_exist: bool = False
    """A root that is missing is unavailable, not empty, and no write creates it. Set it before the store is wrapped."""
    remote_create: bool = False
    """A daemon's database decides create-only writes, because the store itself cannot."""

    @property
    def once(self) -> Store:
        """The same store without repeated requests, for what is not worth a wait."""
        return self

    def reconnect(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Read the credentials again, where they are not given as options: an open connection keeps those it has."""

    @property
    def on_this_host(self) -> bool:
        """Whether the objects are known to be on this host alone, so that all its processes share one cache of them."""
        return False

    @property
    def elsewhere(self) -> Sequence[Store]:
        """Stores with other copies of the same objects, which heal those that are damaged."""
        return ()

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object, replacing any existing one; durable on return."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Write a whole object unless it exists; durable on return.

        False means that the object exists. After a lost reply, this call itself may have created it: a caller to whom
        that matters must read the object back, as ckptstore.commits.commit does.
        """

    @abstractmethod
    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """Write a large object sequentially. size_hint: expected bytes, 0 if unknown."""

    def open_replacement(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """Like open_writer, for an object that may exist: readers see the old one until the commit, then the new one.

        Here: one `put` of all bytes, which are in memory until then.
        """
        return _WholeWriter(self, key)

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object."""

    def find(self, key: str) -> bytes | None:
        """The whole object; None if it does not exist."""
        try:
            return self.get(key)
        except ObjectMissing:
            return None

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Read from `offset` into the buffer; returns the number of bytes, short only at the object's end."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of the object in bytes."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, in key order. A prefix may end within a name."""

    @abstractmethod
    def list_folders(self, prefix: str) -> Iterator[str]:
        """Names of the folders directly below `prefix` that contain objects, in order, without "/"."""

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete objects; an object that does not exist counts as deleted."""

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """Abort unfinished uploads below `prefix` that began before that time; returns their number.

        Does nothing on a store whose unfinished uploads are ordinary objects, or that has none.
        """
        return 0

    def get_range(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `offset`. Raises CorruptObject if the object ends early."""
        check_length(self.object_url(key), offset, self.read_into(key, offset, buffer), len(buffer))

    def open_reader(self, key: str) -> ObjectReader:
        """Read an object in several ranges. Raises ObjectMissing here or at the first read."""
        return RangeReader(partial(self.get_range, key))

    def object_url(self, key: str) -> str:
        """The URL of one object, for messages."""
        return f"{self.url}/{key}"


class WrappedStore(Store):
    """Forwards every method to another store: by `_request`, which a subclass may repeat; if it changes something, by
    `_change` or `_open`. A listing is one request, whole when it returns."""

    def __init__(self, store: Store) -> None:
        self._store = store
        for name in Store.__annotations__:
            setattr(self, name, getattr(store, name))

    @property
    @override
    def once(self) -> Store:
        once = copy(self)
        once._store = self._store.once
        return once

    @property
    @override
    def on_this_host(self) -> bool:
        return self._store.on_this_host

    @override
    def reconnect(self) -> None:
        self._store.reconnect()

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._change(self._store.put, key, data)

    @override
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._change(self._store.put_if_absent, key, data)

    @override
    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return self._open(self._store.open_writer, key, size_hint)

    @override
    def open_replacement(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return self._open(self._store.open_replacement, key, size_hint)

    @override
    def get(self, key: str) -> bytes:
        return self._request(self._store.get, key)

    @override
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        return self._request(self._store.read_into, key, offset, buffer)

    @override
    def size(self, key: str) -> int:
        return self._request(self._store.size, key)

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._request(lambda: [*self._store.list(prefix)]))

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        return iter(self._request(lambda: [*self._store.list_folders(prefix)]))

    @override
    def delete_many(self, keys: Iterable[str]) -> None:
        self._change(self._store.delete_many, keys)

    @override
    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        return self._change(self._store.abort_uploads, prefix, begun_before)

    @override
    def open_reader(self, key: str) -> ObjectReader:
        return self._store.open_reader(key)

    def _request(self, call: Callable[..., _T], *args: Any) -> _T:
        return call(*args)

    def _change(self, call: Callable[..., _T], *args: Any) -> _T:
        return self._request(call, *args)

    def _open(self, call: Callable[..., ObjectWriter], *args: Any) -> ObjectWriter:
        return call(*args)


def check_length(url: str, offset: int, count: int, expected: int) -> None:
    """Raises CorruptObject unless a reader got all of the bytes from `offset` that it expected."""
    if count != expected:
        raise CorruptObject(f"{url} ends after {offset + count} bytes, {offset + expected} were expected")


_CREATES = {
    "s": "aws s3 mb s3://", "g": "gcloud storage buckets create gs://", "a": "az storage container create --name ",
}  # fmt: skip
"""Commands that create a bucket, by the first letter of the schemes."""
_NO_BUCKET, _NO_UPLOAD = "NoSuchBucket", "NoSuchUpload"
_LASTING = frozenset((
    errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSYS,
    errno.ENOTDIR, errno.ENOTEMPTY, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV,
))  # fmt: skip
"""Errors of a request that fails again in the same way."""
_NO_CREDENTIALS = ("NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Errors of botocore. Others, such as CredentialRetrievalError, may be an outage of the service that issues them."""
_REFUSED_CODES = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, NOT_SATISFIABLE = 401, 403, 404, 416
_REFUSED = frozenset((400, 405, 411, 412, 413, 416))
"""Statuses of requests that are refused again."""


def no_such_bucket(url: str) -> NoSuchBucket:
    """The error for an object or prefix in a bucket that does not exist."""
    scheme, _, path = url.partition("://")
    command = _CREATES[scheme[0]] + path.partition("/")[0]
    return NoSuchBucket(
        f"the bucket of {url} does not exist",
        f"Check the store's URL, the endpoint and the credentials, or create the bucket: {command}",
    )


@contextmanager
def store_errors(what: str, url: str) -> Iterator[None]:
    """Translate the operating system's and fsspec's errors on object `url` into ours."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise _translate(error, what, url) from error


def _has_code(error: BaseException | None, code: str) -> bool:
    """Whether S3 answered with this code: to our own request, or to s3fs, which gives botocore's error."""
    return isinstance(error, FileNotFoundError) and (code in (error.strerror or "") or _reply_code(error) == code)


def http_status(error: BaseException | None) -> int:
    """The status of the reply that s3fs, gcsfs or adlfs gives as this error or as its cause; 0 if there is none."""
    while error is not None:
        for name in ("status_code", "status", "code"):  # azure-core's, aiohttp's, gcsfs's
            if str(status := getattr(error, name, "")).isdecimal():
                return int(status)
        if str(error).startswith("Forbidden: "):  # all that gcsfs says
            return _FORBIDDEN
        if status := _reply(error).get("ResponseMetadata", {}).get("HTTPStatusCode"):
            return int(status)
        error = error.__cause__
    return 0


def _reply_code(error: Exception) -> str:
    return str(_reply(error.__cause__).get("Error", {}).get("Code", ""))


def _reply(error: BaseException | None) -> dict[str, Any]:
    """The reply of an S3 service in botocore's error; empty if it is no such error. azure-core's is no dictionary."""
    reply = getattr(error, "response", None)
    return reply if isinstance(reply, dict) else {}


def _translate(error: Exception, what: str, url: str) -> CkptError:
    if _has_code(error, _NO_BUCKET):
        return no_such_bucket(url)
    if _has_code(error, _NO_UPLOAD):  # no object is missing: another upload can succeed
        return StoreUnavailable(
            f"cannot {what} {url}: the service has aborted its upload",
            "Try again. A lifecycle rule of the bucket must leave unfinished uploads alone for a day",
        )
    status = http_status(error)
    if isinstance(error, FileNotFoundError) or status == _NOT_FOUND:
        return ObjectMissing(f"cannot {what} {url}: it does not exist")
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"cannot {what} {url}: no space left",
            "Free space, or prune old checkpoints now (ckptctl prune --grace 0s); committed checkpoints are untouched",
        )
    lacking = type(error).__name__ in _NO_CREDENTIALS or _reply_code(error) in (*_REFUSED_CODES, str(_UNAUTHORIZED))
    if lacking or status == _UNAUTHORIZED:
        return StoreReadOnly(
            f"cannot {what} {url}: {type(error).__name__}: {error}",
            "Give this process valid credentials, or renew them: environment, profile or role",
        )
    # Errors that s3fs raises itself have no number.
    if isinstance(error, PermissionError) or number == errno.EROFS or status == _FORBIDDEN:
        return StoreReadOnly(f"cannot {what} {url}: {error}", "Check the permissions or credentials of this process")
    return StoreUnavailable(
        f"cannot {what} {url}: {type(error).__name__}: {error}",
        "Check that the store is mounted or reachable, and its credentials",
    )


def is_lasting(error: Exception) -> bool:
    """Whether an error of a store is no outage: the same request would fail again, so that a retry is useless.

    Full and read-only stores, missing objects, buckets and uploads, refused and invalid requests. For errors of this
    project, with the original one as their cause.
    """
    cause = error.__cause__
    if not isinstance(error, StoreUnavailable) or isinstance(error, NoSuchBucket) or _has_code(cause, _NO_UPLOAD):
        return True
    if http_status(cause) in _REFUSED:
        return True
    if isinstance(cause, OSError):
        return cause.errno in _LASTING
    # A RuntimeError: not implemented, or the interpreter is ending; adlfs's has another error as its cause. The last is
    # botocore's, such as a bucket's name.
    wrong = ArithmeticError | AttributeError | ImportError | LookupError | RuntimeError | TypeError | ValueError
    if isinstance(cause, RuntimeError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return isinstance(cause, wrong) or type(cause).__name__ == "ParamValidationError"
