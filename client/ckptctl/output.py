"""Output formats and exit codes, for scripts. Every code but the last is the `exit_code` of a CkptError."""

from __future__ import annotations

from enum import StrEnum

from ckptstore.errors import BadInput, CkptError


class Output(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    ID = "id"


OK = 0
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    OK: "done",
    1: "another error",
    2: "wrong usage, or a confirmation is missing",
    3: "done in part",
    4: "no such checkpoint",
    5: "damaged: verification failed",
    6: "refused: held by a reader, or in conflict with a decision",
    7: "store or daemon unreachable",
    8: "not allowed: by the store, or the token is missing, invalid or lacks a scope",
    INTERRUPTED: "interrupted",
}


class ConfirmationMissing(BadInput):
    """A deletion was not confirmed; nothing was deleted."""

    code = "confirmation_missing"


class Unhealthy(CkptError):
    """A check of a store or a daemon failed; the findings are printed."""

    code = "unhealthy"
