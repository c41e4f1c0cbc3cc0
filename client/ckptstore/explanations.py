"""What every error means, and what to do: for the daemon's page of errors and for the reference.

A class of errors.py says in a line what it is for; here is the text for the reader who met it. Plain text, with code in
backquotes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptstore.errors import CkptError


class Explanation(NamedTuple):
    """One code of an error."""

    meaning: str
    remedy: str


EXPLANATIONS: dict[str, Explanation] = {
    "error": Explanation(
        "Base of all others.",
        "Read the message; this error should have a code of its own.",
    ),
    "bad_input": Explanation(
        "Group: the request is wrong; nothing was done.",
        "Change the request.",
    ),
    "invalid_name": Explanation(
        "A run, attempt, shard or checkpoint id breaks the naming rules.",
        (
            "A run has 1 to 128 letters, digits, `.`, `_` or `-`, begins with a letter or digit, and has no `..`; "
            "a checkpoint is `RUN@STEP`, `RUN@STEP.ULID` or `RUN@latest`."
        ),
    ),
    "invalid_request": Explanation(
        "An argument is outside its allowed values.",
        "The hint names them.",
    ),
    "invalid_policy": Explanation(
        "A retention policy would keep nothing.",
        "Keep at least 1.",
    ),
    "unknown_scheme": Explanation(
        "No file system is installed for the scheme of the store's URL.",
        "Check the URL, or install the fsspec package of the scheme (`ckptd[s3]` for S3).",
    ),
    "unsupported_object": Explanation(
        (
            "The state, or a file to be imported, contains an object that cannot be stored without pickle, or an "
            "element type that the other format lacks; or a file to be imported is compressed, or repeats objects "
            "until its state is far larger than the file. The message names it. Nothing was saved."
        ),
        "Convert it to tensors, numbers, strings, lists or dicts, for instance in its `state_dict`.",
    ),
    "layout_changed": Explanation(
        (
            "On one rank a parameter was added, removed or sharded differently since the first save, at which the "
            "ranks agreed on who writes what. Nothing was saved."
        ),
        "Call `prepare(model, optim)` on all ranks, then save again.",
    ),
    "state_mismatch": Explanation(
        (
            "The checkpoint and the objects given to restore do not fit: a tensor is missing, unexpected, or has "
            "another shape. Nothing was changed."
        ),
        ("Build the same model; or pass `strict=False`, and check `Restored.missing`, `unexpected` and `mismatched`."),
    ),
    "not_found": Explanation(
        "Group: the requested object does not exist.",
        "Check the request.",
    ),
    "no_checkpoint": Explanation(
        "No committed checkpoint matches. This is certain: the store did answer.",
        ("Start from scratch if that is expected; otherwise check the run's name and the store (`ckptctl runs`)."),
    ),
    "object_missing": Explanation(
        "An object that should be in the store is not there.",
        "Another program deletes objects, or the checkpoint was just pruned; use another one.",
    ),
    "no_restore": Explanation(
        ("The daemon has no such restore session: it ended more than a day ago, or the daemon's database was deleted."),
        "Join again, with a new key.",
    ),
    "no_job": Explanation(
        "The daemon has no such job: it ended more than a week ago, or the daemon's database was deleted.",
        "`ckptctl jobs` lists the existing ones.",
    ),
    "no_token": Explanation(
        "The daemon has no token of this name.",
        "`ckptctl token ls` lists the existing ones.",
    ),
    "damaged": Explanation(
        "Group: stored bytes cannot be trusted or understood.",
        "Use another checkpoint.",
    ),
    "corrupt": Explanation(
        (
            "Bytes differ from their checksum, a document breaks its own rules, or a file to be imported is cut "
            "off. Nothing of it was used."
        ),
        (
            "A restore falls back to the previous checkpoint by itself. `ckptctl verify` shows the extent; "
            "suspect the disk or the memory of the host that wrote it."
        ),
    ),
    "unsupported_format": Explanation(
        "Written by a newer version than this one can read.",
        "Upgrade.",
    ),
    "conflict": Explanation(
        "Group: another process decided otherwise, or still needs the object.",
        "Check what it did.",
    ),
    "attempt_aborted": Explanation(
        (
            "The attempt was decided as aborted before it was complete, because nothing had been written to it "
            "for longer than the grace for orphans."
        ),
        "Save again; raise the grace if saves take that long.",
    ),
    "checkpoint_held": Explanation(
        "A reader's lease, a pin, or a checkpoint that references its chunks protects it from deletion.",
        ("Try again later, unpin it, or first delete the checkpoints that reference it; the message names the holder."),
    ),
    "newest_checkpoint": Explanation(
        (
            "The newest checkpoint that a restore of the run can use is deleted only if that is forced; nothing "
            "was deleted."
        ),
        "Save a newer one first, or `ckptctl rm --force`, `?force=true`, `delete(..., force=True)`.",
    ),
    "superseded": Explanation(
        ("Another trainer, or a later restore, has begun to save the run. This trainer's save was not committed."),
        "Stop this job; or restore first, to continue from what is in the store.",
    ),
    "reference_lost": Explanation(
        (
            "A checkpoint whose chunks a save references was deleted before the save was committed. Nothing was "
            "committed."
        ),
        "Save again: chunks that cannot be referenced are stored.",
    ),
    "sweep_begun": Explanation(
        "A deletion cannot be taken back any more: its grace is over, and the data is being deleted or gone.",
        "Restore another checkpoint.",
    ),
    "too_much_to_delete": Explanation(
        "An unconfirmed plan would delete a larger part of a run than is allowed. Nothing was deleted.",
        "Check the plan with `--dry-run`; if it is intended, `--force`.",
    ),
    "policies_changed": Explanation(
        "Another client changed the retention policies since they were read. Nothing was changed.",
        "Read the new version, and change that.",
    ),
    "token_exists": Explanation(
        "A token of this name already exists.",
        "Choose another name, rotate it, or revoke it first.",
    ),
    "restore_ended": Explanation(
        (
            "The restore session that a rank tries to join has ended. The message contains its final state, and "
            "the rank that caused it."
        ),
        "Join with a new key: a key names one restore of a job.",
    ),
    "restore_mismatch": Explanation(
        "A rank joins a restore session with another number of ranks, or another checkpoint.",
        "All ranks of a job must send the same; a new restore needs a new key.",
    ),
    "denied": Explanation(
        "Group: the daemon does not do this for this caller; nothing was done.",
        "Use another token.",
    ),
    "unauthorized": Explanation(
        "No token was given, or one that is unknown, revoked or expired.",
        "Set `CKPT_TOKEN`; the daemon's operator creates tokens.",
    ),
    "forbidden": Explanation(
        (
            "The token is valid, but lacks the scope or is bound to other runs. The message names the missing "
            "permission."
        ),
        "Use a token that has it.",
    ),
    "too_many_failures": Explanation(
        "More than ten requests a minute from this address had a wrong token.",
        "Correct the token and wait a minute; tokens that the address used before still work.",
    ),
    "unavailable": Explanation(
        "Group: a store, a daemon or another rank failed.",
        "Try again.",
    ),
    "no_such_bucket": Explanation(
        'The bucket of the store does not exist, which is not "no checkpoint".',
        "Check the URL and the endpoint, or create the bucket.",
    ),
    "run_vanished": Explanation(
        (
            "`restore` or `prepare` found nothing at all of a run that had checkpoints when this host last saved "
            "or restored it: an unmounted volume, or another URL."
        ),
        "Mount the volume. If the run was deleted on purpose, remove the note that the message names.",
    ),
    "store_unavailable": Explanation(
        "The store did not answer, or answered with an error. Its contents are unknown.",
        "Check network, credentials and the service. Do not start from scratch on it.",
    ),
    "store_full": Explanation(
        "No space or quota is left. Committed checkpoints are untouched.",
        "Free space, or `ckptctl prune`.",
    ),
    "store_read_only": Explanation(
        "The store refuses the request: it is read-only, or the credentials are missing, expired or lack a permission.",
        "Mount it writable, or give this process credentials with the permission that the message names.",
    ),
    "clock_skew": Explanation(
        (
            "The store's clock and ours are more than five minutes apart, so the age of objects cannot be "
            "determined. Nothing was deleted."
        ),
        "Set the clocks.",
    ),
    "store_unsafe": Explanation(
        (
            "The store accepts create-only writes and overwrites: two parties could both win a decision; or a "
            "daemon decided, and this store does not contain the decision. Nothing was deleted."
        ),
        "Go through a daemon that serves the same store, or use a store that honours `If-None-Match: *`.",
    ),
    "daemon_unavailable": Explanation(
        "ckptd did not answer.",
        "Check that it runs and that the URL is right. Saves and restores also work without it.",
    ),
    "rank_lost": Explanation(
        (
            "Another rank of the job sent no heartbeat for `peer_timeout_s`, in a restore or at the first save. "
            "The message names it."
        ),
        "Check that rank's log and restart the job; raise the time-out if it was only slow.",
    ),
    "index_unavailable": Explanation(
        "The daemon's database did not answer.",
        "Check the file or server behind `--db`; it is a cache and may be deleted.",
    ),
    "leadership_lost": Explanation(
        "In the daemon's log: it is not the leader any more, and leaves housekeeping to the new leader.",
        (
            "Nothing, unless it happens often: then the machine or the database is overloaded, or `--leader- "
            "lease-seconds` is too short."
        ),
    ),
    "too_many_restores": Explanation(
        "A thousand restore sessions are under way.",
        "Wait, or cancel some (`DELETE /v1/restores/{id}`).",
    ),
    "too_many_requests": Explanation(
        "The client, or all clients together, reached a limit on concurrent streams, requests or jobs.",
        "Wait for `Retry-After` seconds.",
    ),
    "restore_failed": Explanation(
        (
            "A rank failed in a restore with an error that has no code of its own; the message names the rank and "
            "the cause. All ranks get it."
        ),
        "The objects contain a mixture of old and restored values: rebuild them before training.",
    ),
    "save_failed": Explanation(
        (
            "A background save did not become durable, which the next call raises; or `dcp.save` got fewer "
            "results than it had planned."
        ),
        "The message names the cause; the next save is independent of this one.",
    ),
    "saver_died": Explanation(
        "The saver process ended while saves were under way.",
        "Check for an out-of-memory kill; the next save starts a new saver.",
    ),
    "snapshot_torn": Explanation(
        (
            "Something other than `optim.step()` changed parameters or optimizer state after `save_async` "
            "returned, while they were still being copied. Nothing was committed; the process continues without "
            "overlap."
        ),
        (
            "Change the state before `save_async` or after the `step()` of its own optimizer, or pass "
            "`overlap=False`; the message names some entries."
        ),
    ),
    "save_skipped": Explanation(
        (
            "A save was skipped, as `on_busy` specifies, because all slots were in use on this rank or another "
            "one; the message names it. Only `SaveHandle.result` raises it."
        ),
        ("Nothing; the next save is independent of it. More `slots`, or a longer interval, if it happens often."),
    ),
    "rank_failed": Explanation(
        (
            "Another rank could not do its part of a save, and aborted it; the message names that rank and its "
            "error (a torn snapshot, a saver that died, a store that refused its shard, an error of "
            "`save_async`). Nothing was committed. The next save logs it and does not raise it; `wait` and "
            "`close` do."
        ),
        "Check that rank; the next save is independent of it.",
    ),
    "receipts_missing": Explanation(
        ("Some ranks did not finish their shard in time; nothing was committed. Later saves do not wait for this one."),
        "Check the ranks that the message names.",
    ),
    "partly_done": Explanation(
        (
            "Only a part of the operation was done: some checkpoints were held, a job was cancelled or its daemon "
            "ended, or an export left out state of single ranks."
        ),
        "Call it again for the rest; the message lists what an export left out.",
    ),
}
"""By code, group by group."""


def kinds() -> dict[str, type[CkptError]]:
    """Every kind of error by its code."""
    return {kind.code: kind for kind in _and_below(CkptError) if "code" in vars(kind)}


def _and_below(kind: type[CkptError]) -> Iterator[type[CkptError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _and_below(child)
