"""Names of runs, attempts, checkpoints and objects, validated wherever they enter. No I/O.

A valid name contains no "..", and its slashes are replaced, so that joined names never leave the root of the store.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from operator import index

import xxhash
from ulid import ULID

from ckptstore.errors import InvalidName
from ckptstore.values import Value

MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**6 - 1
MAX_RANKS = 100_000
"""Names of shards and receipts have five digits."""
LATEST = "latest"

_RUN = re.compile(r"(?!.*(?:\.\.|/[^A-Za-z0-9]))[A-Za-z0-9](?:[A-Za-z0-9._=,/-]{0,126}[A-Za-z0-9._=,-])?")
_ATTEMPT = re.compile(r"(?:(?!0{6})(?P<generation>[0-9]{6})-)?(?P<step>[0-9]{12})-(?P<ulid>[0-9A-Z]{26})")
_GENERATION = re.compile(r".*/generations/(?!0{6})([0-9]{6})\.json")
_DELETED_LIST = re.compile(r".*/dead/([0-9]{6})\.(?!0{8})([0-9]{8})\.json")
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_OPTIMIZER = ".optimizer.ckpt"
_SHARD = re.compile(r"shard-[0-9]{5}(?:\.optimizer)?\.ckpt")
_THINNING = re.compile(r"thinned|thin-[0-7][0-9A-HJKMNP-TV-Z]{25}")
_RECEIPT = re.compile(r".*/shard-([0-9]{5})\.json")
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REFERENCE = re.compile(  # `latest` has no ULID, and no tag looks as if it had one
    r"(?P<run>[^@]+)@(?:latest|(?P<step>[0-9]{1,12})(?:\.(?P<ulid>[0-9A-Z]{26}))?"
    r"|(?!latest\.[0-9A-Z]{26}$)(?P<name>best:.{1,128}:(?:min|max)|[A-Za-z][A-Za-z0-9._-]{0,63}))"
)


def check_run(run: str) -> str:
    """`run` itself, or InvalidName."""
    return _check(
        _RUN, run, "run name",
        "Use 1 to 128 letters, digits, or any of . _ - = , / with a letter or digit first and after a '/'; no '..'",
    )  # fmt: skip


def name_of(folder: str) -> str:
    """The run that a folder stands for, unchecked: the inverse of `RunKeys.folder`."""
    return folder.replace("~", "/")


def run_of(key: str) -> str:
    """The run that an object belongs to. Raises InvalidName."""
    return check_run(name_of(key.partition("/")[0]))


def is_run(text: str) -> bool:
    """Whether `text` is the name of a run."""
    return _RUN.fullmatch(text) is not None


def check_pin(name: str) -> str:
    """`name` itself, or InvalidName."""
    return _check(
        _PIN, name, "pin name", "Use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
    )


def check_shard(name: str) -> str:
    """`name` itself, or InvalidName."""
    return _check(_SHARD, name, "shard name", "Shards are named shard-00000.ckpt")


def check_ulid(ulid: str) -> str:
    """`ulid` itself, or InvalidName."""
    return _check(_ULID, ulid, "ULID", "A ULID is 26 characters of Crockford's base 32")


def is_ulid(text: str) -> bool:
    """Whether `text` is a ULID."""
    return _ULID.fullmatch(text) is not None


THINNED = "thinned"
"""In the place of a tombstone's id: the optimizer state of a checkpoint is deleted."""


def is_thinning(id: str) -> bool:
    """Whether this is the id of a tombstone of the optimizer state alone, thin-ULID, or THINNED.

    Programs that do not know such ids hide the checkpoint.
    """
    return _THINNING.fullmatch(id) is not None


def check_step(step: int) -> int:
    """`step` itself, or InvalidName."""
    return _check_number(step, MAX_STEP, "step")


def check_generation(number: int) -> int:
    """`number` itself, or InvalidName."""
    return _check_number(number, MAX_GENERATION, "generation")


def _check(allowed: re.Pattern[str], text: str, what: str, hint: str) -> str:
    if not isinstance(text, str) or not allowed.fullmatch(text):
        raise InvalidName(f"{what} {text!r} is not allowed", hint)
    return text


def _check_number(number: int, most: int, what: str) -> int:
    # Not SupportsIndex: a check against a protocol takes longer than all others of an attempt together.
    if isinstance(number, bool) or not hasattr(number, "__index__") or not 0 <= index(number) <= most:
        raise InvalidName(f"{what} {number!r} is not allowed", f"Use an integer from 0 to {most}")
    return index(number)


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt to save a step of a run. Sorted by generation, then step, then ULID.

    The ULID alone identifies it within the run. Attempts of format 1 do not name their generation: it is 0.
    """

    generation: int = field(default=0, kw_only=True)
    step: int
    ulid: str

    def __post_init__(self) -> None:
        check_generation(self.generation)
        check_step(self.step)
        check_ulid(self.ulid)

    def __str__(self) -> str:
        generation = f"{self.generation:06d}-" if self.generation else ""
        return f"{generation}{self.step:012d}-{self.ulid}"

    @staticmethod
    def parse(text: str) -> Attempt:
        """The inverse of `str`. Raises InvalidName."""
        match = _ATTEMPT.fullmatch(text)
        if match is None:
            raise InvalidName(f"{text!r} is not an attempt", "It is named <6-digit generation>-<12-digit step>-<ULID>")
        return Attempt(int(match["step"]), match["ulid"], generation=int(match["generation"] or 0))


BARRIER = Attempt(MAX_STEP, "0" * 26)
"""No attempt. Readers of format 1 meet its outcome first, cannot read it, and do not continue from an old step."""


def new_ulid(now: float) -> str:
    """A new ULID for the time `now` (seconds since the epoch)."""
    # Not ULID.from_timestamp: within a millisecond its generator increments, also in a forked process.
    return str(ULID(int(now * 1000).to_bytes(6, "big") + os.urandom(10)))


def ulid_time(ulid: str) -> float:
    """The time that a ULID was made for, in seconds since the epoch, rounded down to a millisecond."""
    return ULID.from_str(check_ulid(ulid)).milliseconds / 1000


def derive_ulid(session: str, *parts: object) -> str:
    """A ULID that follows from that of a session and from `parts`: equal on all ranks without communication.

    Keeps the session's 48-bit time and replaces its 80 random bits by a hash.
    """
    digest = xxhash.xxh3_128_digest("/".join(map(str, (session, *parts))).encode())
    return str(ULID(ULID.from_str(session).bytes[:6] + digest[:10]))


class Reference(Value):
    """A checkpoint in user input: run@step, run@step.ulid, run@latest, run@TAG or run@best:METRIC:min|max."""

    run: str
    step: int | None = None
    ulid: str | None = None
    name: str | None = None
    """A tag, or best:METRIC:min|max."""

    def __str__(self) -> str:
        """The inverse of `parse`."""
        step = (self.name or LATEST) if self.step is None else self.step
        return f"{self.run}@{step}.{self.ulid}" if self.ulid else f"{self.run}@{step}"

    @property
    def newest(self) -> bool:
        """Whether it means the newest checkpoint of its run."""
        return self.step is None and self.name is None

    @property
    def missing(self) -> str:
        """The words for a checkpoint that is not found: run 'gpt' has no checkpoint at step 5."""
        which = "" if self.newest else f" named {self.name!r}" if self.name else f" at step {self.step}"
        return f"run {self.run!r} has no checkpoint{which}"

    def means(self, attempt: Attempt) -> bool:
        """Whether it may mean this attempt of its run."""
        return self.step == attempt.step and self.ulid in (None, attempt.ulid)

    @staticmethod
    def of(run: str, checkpoint: str | int | None) -> Reference:
        """A step of the run, a tag or best:METRIC:min|max in it, any id, or the run's newest checkpoint for None.

        Raises InvalidName.
        """
        if isinstance(checkpoint, str):
            return Reference.parse(checkpoint if "@" in checkpoint else f"{run}@{checkpoint}")
        return Reference(run, None if checkpoint is None else check_step(checkpoint))

    @staticmethod
    def parse(text: str) -> Reference:
        """Raises InvalidName if `text` is not a reference."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise InvalidName(
                f"{text!r} is not a checkpoint id", "Use RUN@STEP, RUN@latest, RUN@TAG or RUN@best:METRIC:min"
            )
        step = int(match["step"]) if match["step"] else None
        ulid = check_ulid(match["ulid"]) if match["ulid"] else None
        return Reference(check_run(match["run"]), step, ulid, match["name"])


def checkpoint_id(run: str, attempt: Attempt) -> str:
    """The full id of one checkpoint: run@step.ulid."""
    return f"{run}@{attempt.step}.{attempt.ulid}"


def shard_name(rank: int, optimizer: bool = False) -> str:
    """The name of the shard that `rank` writes; optimizer: of the one with its optimizer state."""
    return f"shard-{rank:05d}{_OPTIMIZER if optimizer else '.ckpt'}"


def is_optimizer_shard(key: str) -> bool:
    """Whether an object with this name or key is a shard that a thinned checkpoint lacks."""
    return key.endswith(_OPTIMIZER)


def of_optimizer(name: str) -> bool:
    """Whether this is the name of an item with the state of optimizers, or of an entry in one."""
    return name.partition("/")[0].partition(".")[0] == "optim"


class _Folder:
    """The prefix of a folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, keys: RunKeys, owner: type[RunKeys]) -> str:
        return f"{keys.folder}/{self._name}/"


class RunKeys(Value):
    """Keys and prefixes of the objects of one run, relative to the store's root. Raises InvalidName."""

    run: str

    commits = _Folder("commits")
    """All outcomes."""
    attempts = _Folder("attempts")
    """All attempts."""
    generations = _Folder("generations")
    """All generations."""
    leases = _Folder("leases")
    """All leases."""
    tombstones = _Folder("tombstones")
    """All tombstones."""
    sweep_decisions = _Folder("fates")
    """All decisions about tombstones."""
    deleted_lists = _Folder("dead")
    """All lists of deleted attempts."""
    pins = _Folder("pins")
    """All pins."""
    labels = _Folder("labels")
    """All labels."""
    references = _Folder("references")
    """All marks of references between attempts."""
    verified = _Folder("verified")
    """The records of checkpoints that a scrub found intact."""
    quarantine = _Folder("quarantine")
    """The records of checkpoints that a scrub or a restore found damaged."""
    heartbeats = _Folder("heartbeats")
    """The heartbeats of trainers."""
    audit = _Folder("audit")
    """The audit log."""

    def __post_init__(self) -> None:
        check_run(self.run)

    @property
    def folder(self) -> str:
        """The folder of everything of the run: a slash in its name is written as "~", which no name has."""
        return self.run.replace("/", "~")

    @property
    def replicated(self) -> str:
        """Exists in a local tier once a checkpoint of the run is remote."""
        return f"{self.folder}/replicated"

    def outcome(self, attempt: Attempt) -> str:
        """The create-only object that decides an attempt."""
        return f"{self.commits}{attempt}.json"

    def generation(self, number: int) -> str:
        """The create-only object that begins a generation."""
        return f"{self.generations}{check_generation(number):06d}.json"

    def tombstone(self, attempt: Attempt, id: str) -> str:
        """The object that hides or thins a checkpoint. id: unique per deletion (a ULID) or thinning, or THINNED."""
        return f"{self.tombstones}{attempt}.{id if is_thinning(id) else check_ulid(id)}.json"

    def sweep_decision(self, attempt: Attempt, id: str) -> str:
        """The create-only object that decides whether the tombstone `id` is swept or undeleted."""
        return f"{self.sweep_decisions}{attempt}.{id if is_thinning(id) else check_ulid(id)}.json"

    def deleted_list(self, generation: int, version: int) -> str:
        """One version of the list of deleted attempts of a generation."""
        return f"{self.deleted_lists}{check_generation(generation):06d}.{version:08d}.json"

    def pin(self, attempt: Attempt, name: str) -> str:
        """A named hold of a checkpoint."""
        return f"{self.pins}{attempt}.{check_pin(name)}.json"

    def labels_version(self, attempt: Attempt, version: int) -> str:
        """One version of the labels of a checkpoint."""
        return f"{self.labels}{attempt}.{version:08d}.json"

    def reference(self, attempt: Attempt, by: Attempt, optimizer: bool = False) -> str:
        """The mark that attempt `by` references chunks of `attempt`; optimizer: of its optimizer state."""
        return f"{self.references}{attempt}.{by}{'.optimizer' if optimizer else ''}.json"

    def lease(self, id: str) -> str:
        """One lease. id: a ULID."""
        return f"{self.leases}{check_ulid(id)}.json"

    def verified_record(self, attempt: Attempt) -> str:
        """The record that a scrub found a checkpoint intact."""
        return f"{self.verified}{attempt}.json"

    def quarantine_record(self, attempt: Attempt) -> str:
        """The record that a scrub or a restore found a checkpoint damaged."""
        return f"{self.quarantine}{attempt}.json"

    def heartbeat(self, id: str) -> str:
        """The heartbeat of one life of a trainer. id: a ULID."""
        return f"{self.heartbeats}{check_ulid(id)}.json"

    def drill(self, attempt: Attempt) -> str:
        """A record of earlier versions, which is ignored and goes with its checkpoint."""
        return f"{self.folder}/drills/{attempt}.json"

    def attempt(self, attempt: Attempt) -> str:
        """Prefix of everything an attempt writes before its outcome."""
        return f"{self.attempts}{attempt}/"

    def thousand(self, attempt: Attempt, number: int) -> str:
        """Prefix of what the ranks from 1,000 x `number` to 999 above write: names have five digits."""
        return f"{self.attempt(attempt)}shard-{number:02d}"

    def shard(self, attempt: Attempt, name: str) -> str:
        """One shard of an attempt."""
        return self.attempt(attempt) + check_shard(name)

    def receipt(self, attempt: Attempt, rank: int) -> str:
        """The receipt of `rank`."""
        return f"{self.attempt(attempt)}shard-{rank:05d}.json"

    def statistics(self, attempt: Attempt, rank: int) -> str:
        """The statistics of the shard of `rank`."""
        return f"{self.attempt(attempt)}shard-{rank:05d}.statistics.json"

    def manifest(self, attempt: Attempt) -> str:
        """The merged manifest of an attempt."""
        return f"{self.attempt(attempt)}manifest.json.zst"


def attempt_and_name(key: str) -> tuple[Attempt, str]:
    """The attempt and the name in a key that ends in ATTEMPT.json or ATTEMPT.NAME.json; the name may be empty.

    Raises InvalidName, also for the barrier, which is no attempt.
    """
    name, _, rest = key.rsplit("/", 1)[-1].removesuffix(".json").partition(".")
    attempt = Attempt.parse(name)
    if attempt == BARRIER:
        raise InvalidName(f"{name!r} is not an attempt")
    return attempt, rest


def receipt_rank(key: str) -> int | None:
    """The rank of the receipt at `key`; None if `key` is not that of a receipt."""
    match = _RECEIPT.fullmatch(key)
    return int(match[1]) if match else None


def generation_number(key: str) -> int | None:
    """The number of the generation at `key`; None if `key` is not that of a generation."""
    match = _GENERATION.fullmatch(key)
    return int(match[1]) if match else None


def deleted_list_version(key: str) -> tuple[int, int] | None:
    """Generation and version of the list of deleted attempts at `key`; None if `key` is not that of one."""
    match = _DELETED_LIST.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


_DECISIONS = ("commits/", "fates/", "generations/", "dead/")


def is_decision(key: str) -> bool:
    """Whether the first creator of this object decides. Other objects are equal from every writer."""
    return key.startswith(POLICIES_PREFIX) or key.partition("/")[2].startswith(_DECISIONS)


# Store-wide objects. A run name cannot start with an underscore.

STORE_ID = "_near/id"
"""The create-only object by which ranks recognize that they save to the same folder."""
HOSTS = "_hosts"
"""The folder of a local tier with the hosts of each run, where each host has a local tier of its own."""
POLICIES_PREFIX = "_policies/"
PROBES_PREFIX = "_probes/"
UNITS_PREFIX = "_units/"


def policies_key(version: int) -> str:
    """One version of the retention policies of a store."""
    return f"{POLICIES_PREFIX}{version:08d}.json"
