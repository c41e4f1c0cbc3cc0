"""Translation of the operating system's and fsspec's errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptstore.errors import CkptError, NoSuchBucket, ObjectMissing, StoreFull, StoreReadOnly, StoreUnavailable

_NO_BUCKET, _NO_UPLOAD = "NoSuchBucket", "NoSuchUpload"
_LASTING = frozenset((
    errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSYS,
    errno.ENOTDIR, errno.ENOTEMPTY, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV,
))  # fmt: skip
"""Errors of a request that fails again in the same way."""
_NO_CREDENTIALS = ("NoAuthTokenError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Errors of botocore. Others, such as CredentialRetrievalError, may be an outage of the service that issues them."""
_UNAUTHORIZED = 401
_REFUSED_CODES = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")


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
        if _has_code(error, _NO_BUCKET):
            raise no_such_bucket(url) from error
        if _has_code(error, _NO_UPLOAD):  # no object is missing: another upload can succeed
            raise StoreUnavailable(
                f"cannot {what} {url}: the service has aborted its upload",
                "Try again. A lifecycle rule of the bucket must leave unfinished uploads alone for a day",
            ) from error
        raise ObjectMissing(f"cannot {what} {url}: it does not exist") from error
    except Exception as error:
        raise _translate(error, what, url) from error


def _has_code(error: BaseException | None, code: str) -> bool:
    """Whether S3 answered with this code: to our own request, or to s3fs, which gives botocore's error."""
    return isinstance(error, FileNotFoundError) and (code in (error.strerror or "") or _reply_code(error) == code)


def _lacks_credentials(error: Exception) -> bool:
    """Whether there are no credentials, or the service does not accept them (any more)."""
    return (
        type(error).__name__ in _NO_CREDENTIALS
        or _reply_code(error) in (*_REFUSED_CODES, str(_UNAUTHORIZED))
        or (_reply(error).get("ResponseMetadata", {}).get("HTTPStatusCode") == _UNAUTHORIZED)
    )


def _reply_code(error: Exception) -> str:
    return str(_reply(error).get("Error", {}).get("Code", ""))


def _reply(error: Exception) -> dict[str, Any]:
    """The reply of an S3 service to s3fs, which gives botocore's error as the cause; empty if there is none."""
    return getattr(error.__cause__, "response", None) or {}


def _translate(error: Exception, what: str, url: str) -> CkptError:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"cannot {what} {url}: no space left",
            "Free space, or prune old checkpoints now (ckptctl prune --grace 0s); committed checkpoints are untouched",
        )
    if _lacks_credentials(error):
        return StoreReadOnly(
            f"cannot {what} {url}: {type(error).__name__}: {error}",
            "Give this process valid credentials, or renew them: environment, profile or role",
        )
    # Errors that s3fs raises itself have no number.
    if isinstance(error, PermissionError) or number == errno.EROFS:
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
    if isinstance(cause, OSError):
        return cause.errno in _LASTING
    # A RuntimeError: not implemented, or the interpreter is ending. The last is botocore's, such as a bucket's name.
    wrong = ArithmeticError | AttributeError | ImportError | LookupError | RuntimeError | TypeError | ValueError
    return isinstance(cause, wrong) or type(cause).__name__ == "ParamValidationError"
