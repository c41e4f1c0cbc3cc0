"""Exit codes, for scripts. Every one but the last comes from the `exit_code` of a CkptError."""

from __future__ import annotations

from ckptstore.errors import BadInput, CkptError

OK = 0
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    OK: "done",
    1: "another error",
    2: "wrong usage, or a confirmation is missing",
    3: "done in part",
    4: "no such checkpoint",
    5: "damaged: verification failed",
    6: "refused: held by a reader, or decided otherwise",
    7: "store or daemon unreachable",
    8: "not allowed: no token, a wrong one, or one that is not for this",
    INTERRUPTED: "interrupted",
}


class ConfirmationMissing(BadInput):
    """Something would be deleted and nobody has agreed to it; nothing was done."""

    code = "confirmation_missing"


class NotWritten(CkptError):
    """A file of the caller's could not be written; nothing was left behind."""

    code = "not_written"


class PartlyDone(CkptError):
    """Some of what was asked for was done, and some was not."""

    code = "partly_done"
    exit_code = 3


class Unhealthy(CkptError):
    """A check of a store or a daemon failed; what was found is printed."""

    code = "unhealthy"
