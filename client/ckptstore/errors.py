"""All errors that this project raises on purpose. A code never changes once it is released.

    CkptError
    ├── BadInput            the request is wrong; nothing was done
    ├── NotFound            the requested object does not exist
    ├── Damaged             stored bytes are not what was written, or not readable by this version
    ├── Conflict            another process decided otherwise, or still needs the object
    ├── Denied              the daemon does not allow this caller to do it; nothing was done
    ├── Unavailable         a store, a daemon or another rank failed; retrying may help
    └── SaveFailed          a background save did not become durable

Exception handlers choose by group, programs by `http_status` and `exit_code`. docs/reference/errors.md lists remedies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class CkptError(Exception):
    """Base of all errors raised on purpose.

    message: what happened, on which object. hint: what to do next.
    """

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    chunks: tuple[tuple[str, int], ...] = ()
    """Shard and number of chunks that could not be read, so that they can be read again to confirm the damage."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class BadInput(CkptError):
    """The request is wrong; nothing was done."""

    code = "bad_input"
    http_status = 422
    exit_code = 2


class InvalidName(BadInput):
    """A run, attempt, shard or checkpoint id that breaks the naming rules."""

    code = "invalid_name"


class InvalidRequest(BadInput):
    """An argument outside its allowed values."""

    code = "invalid_request"


class InvalidPolicy(BadInput):
    """A retention policy that would keep nothing, or is inconsistent."""

    code = "invalid_policy"


class UnknownScheme(BadInput):
    """No fsspec file system is installed for this URL scheme."""

    code = "unknown_scheme"


class LayoutChanged(BadInput):
    """The layout of a rank's state differs from the layout that the ranks agreed on."""

    code = "layout_changed"


class UnsupportedObject(BadInput, TypeError):
    """A leaf of the state has a type that cannot be stored without pickle."""

    code = "unsupported_object"


class StateMismatch(BadInput):
    """The checkpoint and the objects passed to restore do not match."""

    code = "state_mismatch"


class NotFound(CkptError):
    """The requested object does not exist."""

    code = "not_found"
    http_status = 404
    exit_code = 4


class NoCheckpoint(NotFound):
    """No committed checkpoint matches the request."""

    code = "no_checkpoint"


class ObjectMissing(NotFound):
    """An object that should be in the store is not there."""

    code = "object_missing"


class NoRestore(NotFound):
    """The daemon has no such restore session, or has forgotten it."""

    code = "no_restore"


class NoJob(NotFound):
    """The daemon has no such job, or has forgotten it."""

    code = "no_job"


class NoToken(NotFound):
    """The daemon has no token of this name."""

    code = "no_token"


class PartlyDone(CkptError):
    """Only a part of the operation was done."""

    code = "partly_done"
    exit_code = 3


class Damaged(CkptError):
    """Stored bytes cannot be trusted or understood."""

    code = "damaged"
    exit_code = 5


class CorruptObject(Damaged):
    """Bytes differ from their checksum, or a document breaks its own rules."""

    code = "corrupt"


class UnsupportedFormat(Damaged):
    """Written in a newer version of the format than this program reads."""

    code = "unsupported_format"


class Conflict(CkptError):
    """Another process decided otherwise, or still needs the object."""

    code = "conflict"
    http_status = 409
    exit_code = 6


class AttemptAborted(Conflict):
    """The orphan collector aborted this attempt."""

    code = "attempt_aborted"
    http_status = 410


class Superseded(Conflict):
    """A newer trainer, or a later restore, has begun another generation of the run: this one cannot save any more."""

    code = "superseded"


class CheckpointHeld(Conflict):
    """A lease or a pin protects this checkpoint from deletion."""

    code = "checkpoint_held"


class NewestCheckpoint(Conflict):
    """A run's newest checkpoint is not deleted unless that is forced."""

    code = "newest_checkpoint"


class ReferenceLost(Conflict):
    """A checkpoint that an attempt references was deleted before the attempt was committed."""

    code = "reference_lost"


class SweepBegun(Conflict):
    """A deletion can no longer be undone."""

    code = "sweep_begun"
    http_status = 410


class TooMuchToDelete(Conflict):
    """A plan would delete a larger part of a run than is allowed without confirmation."""

    code = "too_much_to_delete"


class PoliciesChanged(Conflict):
    """Another client changed the policies since they were read."""

    code = "policies_changed"


class TokenExists(Conflict):
    """A token of this name already exists."""

    code = "token_exists"


class RestoreEnded(Conflict):
    """The restore session that a rank wants to join is over."""

    code = "restore_ended"


class RestoreMismatch(Conflict):
    """The ranks of one restore session disagree about what they restore."""

    code = "restore_mismatch"


class Denied(CkptError):
    """The daemon does not do this for this caller; nothing was done."""

    code = "denied"
    http_status = 403
    exit_code = 8


class Unauthorized(Denied):
    """No token was given, or one that is unknown, revoked or expired."""

    code = "unauthorized"
    http_status = 401


class Forbidden(Denied):
    """The token is valid, but does not permit this."""

    code = "forbidden"


class TooManyFailures(Denied):
    """Too many requests from one address had a wrong token."""

    code = "too_many_failures"
    http_status = 429


class Unavailable(CkptError):
    """A store, a daemon or another rank failed; retrying may help."""

    code = "unavailable"
    http_status = 503
    exit_code = 7


class StoreUnavailable(Unavailable):
    """The store did not answer, or answered with an error."""

    code = "store_unavailable"


class NoSuchBucket(StoreUnavailable):
    """The bucket of the store does not exist. That is not the same as a store without checkpoints."""

    code = "no_such_bucket"


class RunVanished(Unavailable):
    """The store has nothing of a run that had checkpoints when this host last saw it."""

    code = "run_vanished"


class StoreFull(Unavailable):
    """The store has no space or quota left."""

    code = "store_full"
    http_status = 507


class StoreReadOnly(Unavailable):
    """The store refuses the request: it is read-only, or the credentials are missing, expired or lack a permission."""

    code = "store_read_only"
    exit_code = 8


class ClockSkew(Unavailable):
    """The store's clock and ours differ too much to determine the age of objects."""

    code = "clock_skew"


class StoreUnsafe(Unavailable):
    """The store breaks a guarantee that commits and deletions depend on."""

    code = "store_unsafe"


class DaemonUnavailable(Unavailable):
    """ckptd did not answer."""

    code = "daemon_unavailable"


class RestoreFailed(CkptError):
    """A rank failed in a restore with an error that has no code; the restored state must not be used."""

    code = "restore_failed"


class RankLost(Unavailable):
    """Another rank of this job does not respond."""

    code = "rank_lost"


class IndexUnavailable(Unavailable):
    """The daemon's database did not answer."""

    code = "index_unavailable"


class LeadershipLost(Unavailable):
    """Another daemon is the leader, or may be by now. The process that gets this error must not change the store."""

    code = "leadership_lost"


class TooManyRestores(Unavailable):
    """The daemon has reached its limit of restore sessions."""

    code = "too_many_restores"
    http_status = 429


class TooManyRequests(Unavailable):
    """This client, or all clients together, reached a limit on concurrent work."""

    code = "too_many_requests"
    http_status = 429


class SaveFailed(CkptError):
    """A background save did not become durable."""

    code = "save_failed"


class SaverDied(SaveFailed):
    """The saver process ended while saves were in progress."""

    code = "saver_died"


class SaveSkipped(SaveFailed):
    """A save was skipped by this rank or another one, as `on_busy` specifies. This is not a failure."""

    code = "save_skipped"


class SnapshotTorn(SaveFailed):
    """Something other than an optimizer's step changed the state while it was copied; nothing was committed."""

    code = "snapshot_torn"


class RankFailed(SaveFailed):
    """Another rank could not do its part of a save, so nothing was committed."""

    code = "rank_failed"


class ReceiptsMissing(SaveFailed):
    """Some ranks did not finish their shard in time, so nothing was committed."""

    code = "receipts_missing"


def _tree(cls: type[CkptError]) -> Iterator[type[CkptError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


def error_from_code(code: str, message: str, hint: str = "") -> CkptError:
    """Rebuild an error that crossed a process or HTTP boundary; an unknown code gives CkptError."""
    return {cls.code: cls for cls in _tree(CkptError)}.get(code, CkptError)(message, hint)
