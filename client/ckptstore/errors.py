"""All errors that this project raises on purpose. A code never changes once it is released.

    CkptError
    ├── BadInput            the request is wrong; nothing was done
    ├── NotFound            the requested object does not exist
    ├── Damaged             stored bytes are not what was written, or not readable by this version
    ├── Conflict            another process decided otherwise, or still needs the object
    ├── Denied              the daemon does not allow this caller to do it; nothing was done
    ├── Unavailable         a store, a daemon or another rank failed; retrying may help
    └── SaveFailed          a background save did not become durable

Exception handlers choose by group, programs by `http_status` and `exit_code`. A class's docstring says what the error
means, its `remedy` what to do; docs/reference/errors.md is made from both.
"""

from __future__ import annotations

from typing import ClassVar


class CkptError(Exception):
    """Base of all errors raised on purpose.

    message: what happened, on which object. hint: what to do next.
    """

    code: ClassVar[str] = "error"
    remedy: ClassVar[str] = "Read the message: this error has no code of its own."
    """The remedy, for the reference; a hint says it for one case."""
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
    remedy = "Change the request."
    http_status = 422
    exit_code = 2


class InvalidName(BadInput):
    """A run, attempt, shard or checkpoint id breaks the naming rules."""

    code = "invalid_name"
    remedy = (
        "A run has 1 to 128 letters, digits or any of `._-=,/`, begins with a letter or digit, as what follows a `/` "
        "does, and has no `..`; a checkpoint is `RUN@STEP`, `RUN@STEP.ULID` or `RUN@latest`."
    )


class InvalidRequest(BadInput):
    """An argument is outside its allowed values: a number, a policy that would keep nothing, the scheme of a URL."""

    code = "invalid_request"
    remedy = "The hint names them. For a scheme, install its fsspec package (`ckptd[s3]` for S3)."


class LayoutChanged(BadInput):
    """On one rank a parameter was added, removed or sharded differently since the ranks agreed on who writes what, and
    the other ranks did not come to agree again. Nothing was saved.
    """

    code = "layout_changed"
    remedy = "Change it on all ranks before the same save, or call `prepare(model, optim)` on all ranks and save again."


class UnsupportedObject(BadInput, TypeError):
    """The state, or a file to be imported, contains an object that cannot be stored without pickle, or an element type
    that the other format lacks; or a file to be imported is compressed, or repeats objects until its state is far
    larger than the file. The message names it. Nothing was saved.
    """

    code = "unsupported_object"
    remedy = "Convert it to tensors, numbers, strings, lists or dicts, for instance in its `state_dict`."


class StateMismatch(BadInput):
    """The checkpoint and the objects given to restore do not fit: a tensor is missing, unexpected, or has another
    shape. Nothing was changed.
    """

    code = "state_mismatch"
    remedy = (
        "Build the same model; or pass `strict=False`, and check `Restored.missing`, `unexpected` and `mismatched`."
    )


class NotFound(CkptError):
    """The requested object does not exist. A restore session, a job or a token: it was removed, or ended days ago, or
    the daemon's database was deleted.
    """

    code = "not_found"
    remedy = (
        "Check the name; `ckptctl jobs` and `ckptctl token ls` list what exists. Join a restore again with a new key."
    )
    http_status = 404
    exit_code = 4


class NoCheckpoint(NotFound):
    """No committed checkpoint matches. This is certain: the store did answer."""

    code = "no_checkpoint"
    remedy = "Start from scratch if that is expected; otherwise check the run's name and the store (`ckptctl runs`)."


class ObjectMissing(NotFound):
    """An object that should be in the store is not there."""

    code = "object_missing"
    remedy = "Another program deletes objects, or the checkpoint was just pruned; use another one."


class PartlyDone(CkptError):
    """Only a part of the operation was done: some checkpoints were held, a job was cancelled or its daemon ended, or an
    export left out state of single ranks.
    """

    code = "partly_done"
    remedy = "Call it again for the rest; the message lists what an export left out."
    exit_code = 3


class Damaged(CkptError):
    """Stored bytes cannot be trusted or understood."""

    code = "damaged"
    remedy = "Use another checkpoint."
    exit_code = 5


class CorruptObject(Damaged):
    """Bytes differ from their checksum, a document breaks its own rules, or a file to be imported is cut off. Nothing
    of it was used.
    """

    code = "corrupt"
    remedy = (
        "A restore falls back to the previous checkpoint by itself. `ckptctl verify` shows the extent; suspect the "
        "disk or the memory of the host that wrote it."
    )


class UnsupportedFormat(Damaged):
    """The object was written by a newer version than this one can read."""

    code = "unsupported_format"
    remedy = "Upgrade."


class Conflict(CkptError):
    """Another process decided otherwise, or still needs the object: policies changed since they were read, a token of
    the name exists, a restore session has ended or restores another checkpoint. Nothing was changed.
    """

    code = "conflict"
    remedy = "Read the new state, which the message names, and decide again. A new restore needs a new key."
    http_status = 409
    exit_code = 6


class AttemptAborted(Conflict):
    """The attempt was decided as aborted before it was complete, because nothing had been written to it for longer than
    the grace for orphans.
    """

    code = "attempt_aborted"
    remedy = "Save again; raise the grace if saves take that long."
    http_status = 410


class Superseded(Conflict):
    """Another trainer, or a later restore, has begun to save the run. This trainer's save was not committed."""

    code = "superseded"
    remedy = "Stop this job; or restore first, to continue from what is in the store."


class CheckpointHeld(Conflict):
    """A reader's lease, a pin, or a checkpoint that references its chunks protects it from deletion; or it is the
    newest checkpoint that a restore of the run can use. Nothing was deleted.
    """

    code = "checkpoint_held"
    remedy = (
        "Try again later, unpin it, or first delete the checkpoints that reference it; the message names the holder. "
        "Save a newer checkpoint, or force the deletion of the newest (`ckptctl rm --force`, `delete(..., "
        "force=True)`)."
    )


class ReferenceLost(Conflict):
    """A checkpoint whose chunks a save references was deleted before the save was committed. Nothing was committed."""

    code = "reference_lost"
    remedy = "Save again: chunks that cannot be referenced are stored."


class SweepBegun(Conflict):
    """A deletion cannot be taken back any more: its grace is over, and the data is being deleted or gone."""

    code = "sweep_begun"
    remedy = "Restore another checkpoint."
    http_status = 410


class Thinned(Conflict):
    """The checkpoint was thinned: it has weights, and its optimizer state is deleted. Nothing was changed."""

    code = "thinned"
    remedy = "Restore the weights alone (no optimizer), or the full checkpoint that the message names."


class TooMuchToDelete(Conflict):
    """An unconfirmed plan would delete or thin a larger part of a run than is allowed. Nothing was deleted."""

    code = "too_much_to_delete"
    remedy = "Check the plan with `--dry-run`; if it is intended, `--force`."


class Denied(CkptError):
    """The daemon does not do this for this caller; nothing was done."""

    code = "denied"
    remedy = "Use another token."
    http_status = 403
    exit_code = 8


class Unauthorized(Denied):
    """No token was given, or one that is unknown, revoked or expired."""

    code = "unauthorized"
    remedy = "Set `CKPT_TOKEN`; the daemon's operator creates tokens."
    http_status = 401


class Forbidden(Denied):
    """The token is valid, but lacks the scope or is bound to other runs. The message names the missing permission."""

    code = "forbidden"
    remedy = "Use a token that has it."


class TooManyFailures(Denied):
    """More than ten requests a minute from this address had a wrong token."""

    code = "too_many_failures"
    remedy = "Correct the token and wait a minute; tokens that the address used before still work."
    http_status = 429


class Unavailable(CkptError):
    """A store, a daemon or another rank failed."""

    code = "unavailable"
    remedy = "Try again."
    http_status = 503
    exit_code = 7


class StoreUnavailable(Unavailable):
    """The store did not answer, or answered with an error. Its contents are unknown."""

    code = "store_unavailable"
    remedy = "Check network, credentials and the service. Do not start from scratch on it."


class NoSuchBucket(StoreUnavailable):
    """The bucket of the store does not exist, which is not "no checkpoint"."""

    code = "no_such_bucket"
    remedy = "Check the URL and the endpoint, or create the bucket."


class RunVanished(Unavailable):
    """`restore` or `prepare` found nothing at all of a run that had checkpoints when this host last saved or restored
    it: an unmounted volume, or another URL.
    """

    code = "run_vanished"
    remedy = "Mount the volume. If the run was deleted on purpose, remove the note that the message names."


class StoreFull(Unavailable):
    """No space or quota is left. Committed checkpoints are untouched."""

    code = "store_full"
    remedy = "Free space, or `ckptctl prune`."
    http_status = 507


class StoreReadOnly(Unavailable):
    """The store refuses the request: it is read-only, or the credentials are missing, expired or lack a permission."""

    code = "store_read_only"
    remedy = "Mount it writable, or give this process credentials with the permission that the message names."
    exit_code = 8


class StoreUnsafe(Unavailable):
    """The store breaks a guarantee that deletions depend on. It accepts create-only writes and overwrites, so that two
    parties could both win a decision; or it is a folder without hard links; or a daemon decided, and this store does
    not contain the decision; or its clock and ours are more than five minutes apart, so that the age of objects is
    unknown. Nothing was deleted.
    """

    code = "store_unsafe"
    remedy = (
        "Go through a daemon that serves the same store, or use a store that honours `If-None-Match: *`; set the "
        "clocks."
    )


class DaemonUnavailable(Unavailable):
    """The daemon did not answer."""

    code = "daemon_unavailable"
    remedy = "Check that it runs and that the URL is right. Saves and restores also work without it."


class RankLost(Unavailable):
    """Another rank of the job sent no heartbeat for `peer_timeout_s`, in a restore or at the first save. The message
    names it.
    """

    code = "rank_lost"
    remedy = "Check that rank's log and restart the job; raise the time-out if it was only slow."


class IndexUnavailable(Unavailable):
    """The daemon's database did not answer."""

    code = "index_unavailable"
    remedy = "Check the file or server behind `--db`; it is a cache and may be deleted."


class LeadershipLost(Unavailable):
    """Another daemon is the leader, or may be by now. This one leaves housekeeping to it, and must not change the
    store.
    """

    code = "leadership_lost"
    remedy = (
        "Nothing, unless the daemon's log often has it: then the machine or the database is overloaded, or "
        "`--leader-lease-seconds` is too short."
    )


class TooManyRequests(Unavailable):
    """One client, or all clients together, reached a limit on concurrent streams, requests, jobs or restores."""

    code = "too_many_requests"
    remedy = "Wait for `Retry-After` seconds, or cancel some."
    http_status = 429


class RestoreFailed(CkptError):
    """A rank failed in a restore with an error that has no code of its own; the message names the rank and the cause.
    All ranks get it.
    """

    code = "restore_failed"
    remedy = "The objects contain a mixture of old and restored values: rebuild them before training."


class SaveFailed(CkptError):
    """A background save did not become durable, which the next call raises: for instance, some ranks did not finish
    their shard in time. Or `dcp.save` got fewer results than it had planned.
    """

    code = "save_failed"
    remedy = "The message names the cause, and the ranks; the next save is independent of this one."


class SaverDied(SaveFailed):
    """The saver process ended while saves were under way."""

    code = "saver_died"
    remedy = "Check for an out-of-memory kill; the next save starts a new saver."


class SaveSkipped(SaveFailed):
    """A save was skipped, as `on_busy` specifies, because all slots were in use on this rank or another one; the
    message names it. Only `SaveHandle.result` raises it.
    """

    code = "save_skipped"
    remedy = "Nothing; the next save is independent of it. More `slots`, or a longer interval, if it happens often."


class SnapshotTorn(SaveFailed):
    """Something other than `optim.step()` changed parameters or optimizer state after `save_async` returned, while they
    were still being copied. Nothing was committed; the process continues without overlap.
    """

    code = "snapshot_torn"
    remedy = (
        "Change the state before `save_async` or after the `step()` of its own optimizer, or pass `overlap=False`; "
        "the message names some entries."
    )


class RankFailed(SaveFailed):
    """Another rank could not do its part of a save, and aborted it; the message names that rank and its error (a torn
    snapshot, a saver that died, a store that refused its shard, an error of `save_async`). Nothing was committed. The
    next save logs it and does not raise it; `wait` and `close` do.
    """

    code = "rank_failed"
    remedy = "Check that rank; the next save is independent of it."


class NotWritten(CkptError):
    """A file on this machine, such as that of an export, could not be written; nothing was left behind."""

    code = "not_written"
    remedy = "Check the folder's free space and permissions."


def kinds(base: type[CkptError] = CkptError) -> dict[str, type[CkptError]]:
    """The kinds of errors by their codes, each group before its members."""
    found = {base.code: base} if "code" in vars(base) else {}
    for kind in base.__subclasses__():
        found |= kinds(kind)
    return found


def error_from_code(code: str, message: str, hint: str = "") -> CkptError:
    """Rebuild an error that crossed a process or HTTP boundary; an unknown code gives CkptError."""
    return kinds().get(code, CkptError)(message, hint)
