"""Every failure this project names, with a code that never changes once released.

    CkptError
    ├── BadInput            the request is wrong; nothing was done
    ├── NotFound            what was asked for does not exist
    ├── Damaged             stored bytes are not what was written, or not readable by this version
    ├── Conflict            somebody else decided otherwise, or still needs the object
    ├── Denied              the daemon knows who asks, or does not, and says no; nothing was done
    ├── Unavailable         the outside world failed; trying again may help
    └── SaveFailed          a background save did not become durable

The groups say what a handler would do; docs/errors.md, what people would. `http_status` and `exit_code` are the only
translations, for all programs.
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
    """A retention policy that would keep nothing, or makes no sense."""

    code = "invalid_policy"


class UnknownScheme(BadInput):
    """No fsspec file system is installed for this URL scheme."""

    code = "unknown_scheme"


class LayoutChanged(BadInput):
    """The state of a rank is not laid out as the ranks agreed."""

    code = "layout_changed"


class UnsupportedObject(BadInput, TypeError):
    """A leaf of the state is of a type that cannot be stored without pickle."""

    code = "unsupported_object"


class StateMismatch(BadInput):
    """The checkpoint and the objects given to restore do not fit each other."""

    code = "state_mismatch"


class NotFound(CkptError):
    """What was asked for does not exist."""

    code = "not_found"
    http_status = 404
    exit_code = 4


class NoCheckpoint(NotFound):
    """No committed checkpoint answers the question."""

    code = "no_checkpoint"


class ObjectMissing(NotFound):
    """An object that should be in the store is not there."""

    code = "object_missing"


class NoRestore(NotFound):
    """The daemon knows no such restore session, or no more."""

    code = "no_restore"


class NoJob(NotFound):
    """The daemon knows no such job, or no more."""

    code = "no_job"


class NoToken(NotFound):
    """The daemon has no token of this name."""

    code = "no_token"


class Damaged(CkptError):
    """Stored bytes cannot be trusted or cannot be understood."""

    code = "damaged"
    exit_code = 5


class CorruptObject(Damaged):
    """Bytes differ from their checksum, or a document breaks its own rules."""

    code = "corrupt"


class UnsupportedFormat(Damaged):
    """Written by a newer version of the format than this one reads."""

    code = "unsupported_format"


class Conflict(CkptError):
    """Somebody else decided otherwise, or still needs the object."""

    code = "conflict"
    http_status = 409
    exit_code = 6


class AttemptAborted(Conflict):
    """The collector of orphans decided that this attempt never happened."""

    code = "attempt_aborted"
    http_status = 410


class CheckpointHeld(Conflict):
    """A lease or a pin protects this checkpoint from deletion."""

    code = "checkpoint_held"


class ReferenceLost(Conflict):
    """A checkpoint that an attempt references was deleted before the attempt was committed."""

    code = "reference_lost"


class SweepBegun(Conflict):
    """A deletion can no longer be taken back."""

    code = "sweep_begun"
    http_status = 410


class TooMuchToDelete(Conflict):
    """A plan would delete a larger part of a run than is allowed without looking."""

    code = "too_much_to_delete"


class PoliciesChanged(Conflict):
    """Somebody else changed the policies since they were read."""

    code = "policies_changed"


class TokenExists(Conflict):
    """There is a token of this name already."""

    code = "token_exists"


class RestoreEnded(Conflict):
    """The restore session that a rank wants to join is over."""

    code = "restore_ended"


class RestoreMismatch(Conflict):
    """The ranks of one restore session disagree about what they restore."""

    code = "restore_mismatch"


class Denied(CkptError):
    """The daemon does not do this for whoever asks; nothing was done."""

    code = "denied"
    http_status = 403
    exit_code = 8


class Unauthorized(Denied):
    """No token was given, or one that is unknown, revoked or expired."""

    code = "unauthorized"
    http_status = 401


class Forbidden(Denied):
    """The token is good, but not for this."""

    code = "forbidden"


class TooManyFailures(Denied):
    """Too many requests from one address had a wrong token."""

    code = "too_many_failures"
    http_status = 429


class Unavailable(CkptError):
    """The outside world failed; trying again may help."""

    code = "unavailable"
    http_status = 503
    exit_code = 7


class StoreUnavailable(Unavailable):
    """The store did not answer, or answered with an error."""

    code = "store_unavailable"


class StoreFull(Unavailable):
    """No space or quota left in the store."""

    code = "store_full"
    http_status = 507


class StoreReadOnly(Unavailable):
    """The store refuses writes."""

    code = "store_read_only"


class ClockSkew(Unavailable):
    """The store's clock and ours are too far apart to judge how old anything is."""

    code = "clock_skew"


class StoreUnsafe(Unavailable):
    """The store breaks a promise that deleting rests on."""

    code = "store_unsafe"


class DaemonUnavailable(Unavailable):
    """ckptd did not answer."""

    code = "daemon_unavailable"


class RestoreFailed(CkptError):
    """A rank failed in a way that no other code tells; nothing may be trained on."""

    code = "restore_failed"


class RankLost(Unavailable):
    """Another rank of this job does not answer."""

    code = "rank_lost"


class IndexUnavailable(Unavailable):
    """The daemon's database did not answer."""

    code = "index_unavailable"


class LeadershipLost(Unavailable):
    """Another daemon leads, or may lead by now: whoever gets this must leave the store alone."""

    code = "leadership_lost"


class TooManyRestores(Unavailable):
    """The daemon watches over as many restore sessions as it can."""

    code = "too_many_restores"
    http_status = 429


class TooManyRequests(Unavailable):
    """The daemon does for this client, or for all together, as much at a time as it may."""

    code = "too_many_requests"
    http_status = 429


class SaveFailed(CkptError):
    """A background save did not become durable."""

    code = "save_failed"


class SaverDied(SaveFailed):
    """The saver process ended while saves were under way."""

    code = "saver_died"


class SaveSkipped(SaveFailed):
    """A save was given up as `on_busy` asks for, by this rank or another one; that is no failure."""

    code = "save_skipped"


class SnapshotTorn(SaveFailed):
    """The state was changed while its snapshot was taken, and not by an optimizer."""

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
    """The error that crossed a process or HTTP boundary as its code; unknown codes give CkptError."""
    by_code = {cls.code: cls for cls in _tree(CkptError)}
    return by_code.get(code, CkptError)(message, hint)
