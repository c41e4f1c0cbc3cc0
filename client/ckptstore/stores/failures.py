"""Translation of the operating system's and fsspec's errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from ckptstore.errors import CkptError, NoSuchBucket, ObjectMissing, StoreFull, StoreReadOnly, StoreUnavailable

_NO_BUCKET = "NoSuchBucket"


def no_such_bucket(url: str) -> NoSuchBucket:
    """The error for an object or prefix in a bucket that does not exist."""
    return NoSuchBucket(
        f"the bucket of {url} does not exist",
        "Check the store's URL, the endpoint and the credentials, or create the bucket",
    )


@contextmanager
def store_errors(what: str, url: str) -> Iterator[None]:
    """Translate the operating system's and fsspec's errors on object `url` into ours."""
    try:
        yield
    except CkptError:
        raise
    except FileNotFoundError as error:
        if _lacks_bucket(error):
            raise no_such_bucket(url) from error
        raise ObjectMissing(f"cannot {what} {url}: it does not exist") from error
    except Exception as error:
        raise _translate(error, what, url) from error


def _lacks_bucket(error: FileNotFoundError) -> bool:
    """Whether S3 answered that there is no bucket: to our own request, or to s3fs, which gives botocore's error."""
    reply = getattr(error.__cause__, "response", None) or {}
    return _NO_BUCKET in (error.strerror or "") or reply.get("Error", {}).get("Code") == _NO_BUCKET


def _translate(error: Exception, what: str, url: str) -> CkptError:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"cannot {what} {url}: no space left",
            "Free space, or prune old checkpoints now (ckptctl prune --grace 0s); committed checkpoints are untouched",
        )
    # Errors that s3fs raises itself have no number.
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return StoreReadOnly(f"cannot {what} {url}: {error}", "Check the permissions or credentials of this process")
    return StoreUnavailable(
        f"cannot {what} {url}: {type(error).__name__}: {error}",
        "Check that the store is mounted or reachable, and its credentials",
    )
