"""rehearse: runs a training program, kills and resumes it, and compares it with itself where it was not killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from random import Random
from subprocess import DEVNULL, STDOUT, Popen
from typing import Annotated, NamedTuple

import msgspec

from ckpt.host.rehearsal import Event, Plan
from ckpt.saver.presence import savers
from ckptctl.commands.arguments import an_argument, an_option
from ckptctl.output import Unhealthy
from ckptctl.render import Block, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.analysis.difference import Side, compare
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import decode_json
from ckptstore.format.trees import decode_tree, value_leaves
from ckptstore.reading.source import StoreSource, read_all_local, read_manifest
from ckptstore.stores import REHEARSAL, open_store
from ckptstore.values import Value

_POLL_S = 0.02
_NAMED = 5
_LOG_BYTES = 2000

_MOMENTS = {
    "saved": "a save",
    "loader": "the begin of an epoch",
    "forward": "a batch",
    "window": "an accumulation window",
    "step": "a step of the optimizer",
    "validation": "validation",
}
_CAUSES = {
    "fails": ("the resumed program fails", "Its output is above"),
    "not_restored": (
        "the program begins again, although there is a checkpoint",
        "Call ckpt.restore with the model and the optimizer before the loop, in the run that is saved",
    ),
    "dummy_step": (
        "an optimizer steps between the restore and the first batch, which moves weights, moments and counters",
        "Leave the step out: a restore makes the state of an optimizer that has not stepped",
    ),
    "one_rank": (
        "some ranks go on with other state than they had: adapters, experts or other parts that one rank saves for all",
        "Pass the module that holds them on every rank, under names that differ from rank to rank; data as an extra",
    ),
    "weights": (
        "weights are not those that were trained",
        "Pass the module that holds them to saves and restores, and change nothing of it after the restore",
    ),
    "optimizer": (
        "the state of the optimizer is not the one that was trained, as where it is made at the first step",
        "Pass the optimizer to saves and restores, and do not make it again after the restore",
    ),
    "extras": (
        "what training changes is not saved, or not put back",
        "Pass it by keyword to saves and restores; take numbers and dicts from restored.values",
    ),
    "generator": (
        "a generator of random numbers is not saved",
        "Pass its state as an extra, generator=g.get_state(), and set it after the restore",
    ),
    "loader": (
        "the position in the data is not the one at the save: other samples come, or in another order",
        "Use loader = ckpt.data.resumable(loader), and pass loader=loader to saves and restores",
    ),
    "random": (
        "random numbers are drawn or seeded between the restore and the first batch",
        "Restore last, just before the loop, or call restored.restore_rng() there",
    ),
    "gradients": (
        "the step after the restore has other gradients: the save was made within an accumulation window",
        "Save after the step of the optimizer, or pass grads=True",
    ),
    "nondeterministic": (
        "two runs that were not killed differ, so that no resume can be exact",
        "Seed all generators; set torch.use_deterministic_algorithms(True) and torch.set_num_threads(1) if the same "
        "batch and weights give other gradients",
    ),
    "unknown": (
        "it shows in nothing that was recorded before",
        "Compare the checkpoints: --keep FOLDER, then ckptctl diff",
    ),
}
"""By code: the cause, and the remedy."""


class Kill(Value):
    """A kill, and what came of it. Times in seconds."""

    moment: str
    resumed_from: int
    """The step; -1: the program began again."""
    resume_s: float
    """From the start of the program to its first batch."""
    cost_s: float
    """The same, with the training that was lost."""


class Finding(Value):
    """The first moment at which a resumed run is another one, and why."""

    cause: str
    where: str
    differs: list[str] = []
    ruled_out: list[str] = []
    """Kinds of state that were equal there."""


class _Life(NamedTuple):
    """One start of the program, until it ended or was killed."""

    began: float
    events: list[Event]
    failure: str

    @property
    def resumed_from(self) -> int:
        """The step that was restored; -1: none."""
        return next((one.step for one in self.events if one.kind == "restored"), -1)


def rehearse(
    session: Session,
    command: Annotated[list[str], an_argument("The program, as it is started.", "-- COMMAND...")],
    kills: Annotated[int, an_option("How often to kill it.", "N", min=1)] = 5,
    ranks: Annotated[int, an_option("The processes that torchrun is to start.", "N", min=1)] = 1,
    seed: Annotated[int, an_option("Chooses other moments.", "N")] = 0,
    keep: Annotated[Path | None, an_option("Keep its checkpoints and output there.", "FOLDER")] = None,
) -> None:
    """Prove that a training program resumes exactly: run it twice, then kill and resume it, and compare all by bits.

    The program runs as it is, for a few saves, on a temporary store in the place of the one that it names. It is killed
    within a save, an accumulation window, a validation, at the begin of an epoch, and between. Checkpoints are
    compared, with metrics, random state and extras; after each restore also the batch, gradients and the program's
    variables. Exit code 1: not exact; the cause and the remedy are printed.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-rehearsal-") as temporary:
        folder, done, compared = (keep or Path(temporary)).resolve(), list[Kill](), 0

        def play(name: str, plan: Plan) -> _Life:
            life = _play(command, ranks, folder / name, plan)
            took = max((one.at for one in life.events), default=life.began) - life.began
            saves = sum(one.kind == "saved" and one.rank == 0 for one in life.events)
            session.screen.note(f"{name} {plan.life}: {human.count(saves, 'save')} in {took:.1f} s")
            return life

        first, second = (play(name, Plan(num_saves=kills + 2)) for name in ("uninterrupted", "again"))
        other, finding = set[str](), None
        for where, names, in_tensors in _differences(folder, "again"):
            other |= names  # the time, for example
            if in_tensors and finding is None:
                finding = Finding("nondeterministic", where, sorted(names))
        last, chosen = max(one.step for one in first.events), _moments(first.events, kills, Random(seed))
        for number, at in enumerate((*chosen, None)):
            if finding is None:
                plan, resumes = Plan(number, last=last), any(_checkpoints(folder / "killed"))
                if at is not None:
                    plan.rank, plan.key, plan.savers = at.rank, at.key, number % 2 == 0
                life = play("killed", plan)
                if number:
                    done.append(_kill(first, chosen[number - 1], life))
                finding = _finding(first, second, life, resumes)
                pairs = list(_differences(folder, "killed"))
                compared = len(pairs)
                for where, names, _ in pairs:
                    if finding is None and names - other:
                        finding = Finding("unknown", where, sorted(names - other))
        _report(session, compared, done, finding)


def _play(command: Sequence[str], ranks: int, home: Path, plan: Plan) -> _Life:
    """Start the program, wait until it or one of its ranks has ended, and kill the rest of it.

    Raises InvalidRequest if it fails or saves nothing, or the folder is of another rehearsal.
    """
    if not plan.life and home.exists():
        raise InvalidRequest(f"{home} exists", "Give --keep a new folder")
    home.mkdir(parents=True, exist_ok=True)
    (home / "plan").write_bytes(msgspec.json.encode(plan))
    (killed := home / "killed").unlink(missing_ok=True)
    environment = {**os.environ, REHEARSAL: str(home), "PET_STANDALONE": "1", "PET_NPROC_PER_NODE": str(ranks)}
    began, output = time.monotonic(), home / f"{plan.life}.log"
    with output.open("wb") as log:
        process = Popen(command, env=environment, stdin=DEVNULL, stdout=log, stderr=STDOUT)
        try:
            while (code := process.poll()) is None and not killed.exists():
                time.sleep(_POLL_S)
        finally:
            traces = list(home.glob(f"{plan.life}-*.trace"))
            pids = [process.pid, *(int(path.stem.partition("-")[2]) for path in traces)]
            pids += [one.pid for one in savers() if plan.savers and str(home) in one.store]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    # A process that was killed may have written a part of its last line.
    lines = [line for path in traces for line in path.read_bytes().splitlines(True) if line.endswith(b"\n")]
    events = sorted((decode_json(line, Event) for line in lines), key=lambda one: one.at)
    failure = output.read_text(errors="replace")[-_LOG_BYTES:] if code and not killed.exists() else ""
    if not plan.last and (failure or not events):
        raise InvalidRequest(f"the program fails or saves nothing: {failure}", "Run it without rehearse first")
    return _Life(began, events, failure)


def _moments(events: Sequence[Event], kills: int, random: Random) -> list[Event]:
    """Where to kill: each kind of event in turn, after the second save and before the last one, in order of time."""
    steps, kinds = sorted({one.step for one in events if one.kind == "saved"}), defaultdict[str, list[Event]](list)
    for one in events:
        if one.step in steps[1:-1]:
            kinds[one.kind].append(one)
    for every in kinds.values():
        random.shuffle(every)
    turns = {one.key: one for turn in zip_longest(*kinds.values()) for one in turn if one is not None}
    return sorted(list(turns.values())[:kills], key=lambda one: one.at)


def _kill(first: _Life, at: Event, life: _Life) -> Kill:
    step = life.resumed_from
    reached = max((one.at for one in life.events), default=life.began)  # it may be killed before its first batch
    resume_s = next((one.at for one in life.events if (one.step, one.count) == (step, 1)), reached) - life.began
    lost_s = at.at - next((one.at for one in first.events if (one.step, one.kind) == (step, "saved")), first.began)
    return Kill(f"{_MOMENTS[at.kind]}, after step {at.step}", step, resume_s, resume_s + lost_s)


def _finding(first: _Life, second: _Life, life: _Life, resumes: bool) -> Finding | None:
    """The first difference from the same moment of the uninterrupted runs; None if there is none."""
    if life.failure:
        return Finding("fails", "the restart", [life.failure])
    if resumes and life.resumed_from < 0:
        return Finding("not_restored", "the restart")
    base, again = ({(one.rank, one.key): one.state for one in run.events} for run in (first, second))
    left = {one.rank: set[str]() for one in life.events}
    for one in life.events:
        where, known = f"rank {one.rank}, after step {one.step}", base.get((one.rank, one.key))
        if known is None and resumes and one.kind == "step" and one.count == 1:
            return Finding("dummy_step", where)
        if known is None or not one.state:
            continue
        twin = again.get((one.rank, one.key), {})
        # State of an optimizer that is not there differs, too.
        names = {
            name
            for name, value in known.items()
            if twin.get(name) == value != one.state.get(name, "" if name.startswith("optimizer") else value)
        }
        variables = {name for name in names if name.startswith("variables")}
        # A variable that training never changes is no state: where it began, for example.
        left[one.rank] |= {
            name for name in variables if any(at.get(name, known[name]) != known[name] for at in base.values())
        }
        if names - variables or any(part in name for name in left[one.rank] for part in ("/generator", "/state_dict")):
            kinds = [name.partition("/")[0] for name in sorted(names - variables)]
            before = {each.kind for each in life.events if each.step == one.step and each.count < one.count}
            code = next(
                cause
                for cause, holds in (
                    ("one_rank", left[one.rank] and not all(left.values())), ("weights", "weights" in kinds),
                    ("optimizer", "optimizer" in kinds), ("extras", "extras" in kinds),
                    ("generator", any("/generator" in name for name in names | left[one.rank])),
                    ("loader", "batch" in kinds and "loader" in before), ("random", "random" in kinds),
                    ("extras", left[one.rank]), ("loader", "batch" in kinds), ("gradients", "step" not in before),
                    ("unknown", True),
                )
                if holds
            )  # fmt: skip
            ruled_out = {name.partition("/")[0] for name in known} - {*kinds, "variables"}
            return Finding(code, where, sorted(names - variables | left[one.rank]), sorted(ruled_out))
    return None


def _differences(folder: Path, name: str) -> Iterator[tuple[str, set[str], bool]]:
    """Each checkpoint that a run has in common with the first one, what differs, and whether tensors do."""
    known = {(one.run, one.step): (source, one) for source, one in _checkpoints(folder / "uninterrupted")}
    for source, one in _checkpoints(folder / name):
        if (before := known.get((one.run, one.step))) is not None:
            names = compare(Side.open(*before), Side.open(source, one)).names
            values = dict(set(_values(*before).items()) ^ set(_values(source, one).items()))
            yield f"{one.run}@{one.step}", {*names, *values}, bool(names)


def _checkpoints(home: Path) -> Iterator[tuple[StoreSource, Checkpoint]]:
    for folder in home.glob("*/"):
        source = StoreSource(open_store(str(folder)))
        yield from ((source, one) for run in source.runs() for one in reversed(source.checkpoints(run)))


def _values(source: StoreSource, checkpoint: Checkpoint) -> dict[str, str]:
    """All that is saved beside tensors, of all ranks, by path."""
    manifest = read_manifest(source, checkpoint)
    ranks = {f"rank {rank}": local for rank, local in enumerate(read_all_local(source, checkpoint, manifest))}
    trees = {"metrics": checkpoint.metrics, **manifest.content.trees, **ranks}
    return {path[1:]: str(leaf) for path, leaf in value_leaves(decode_tree(trees, "", lambda _, leaf: str(leaf)), "")}


def _report(session: Session, compared: int, kills: Sequence[Kill], finding: Finding | None) -> None:
    text, remedy = _CAUSES[finding.cause] if finding else ("exact", "")
    rows = [(one.moment, str(one.resumed_from), f"{one.resume_s:.1f} s", f"{one.cost_s:.1f} s") for one in kills]
    table = Table(("KILLED AT", ">RESUMED FROM", ">TO FIRST BATCH", ">COST"), rows)
    result: Block = f"exact: {compared} checkpoints of killed runs equal the uninterrupted run's, bit for bit"
    if finding is not None:
        result = {
            "cause": text,
            "first": finding.where,
            "differs": ", ".join(finding.differs[:_NAMED]),
            "remedy": remedy,
            "ruled out": ", ".join(finding.ruled_out),
        }
    body = {
        "exact": finding is None,
        "compared": compared,
        "kills": kills,
        "finding": finding,
        "text": text,
        "remedy": remedy,
    }
    session.screen.emit(body, [text], [table, result])
    if finding is not None:
        raise Unhealthy(f"the program does not resume exactly: {text}", remedy)
