"""Commands on many checkpoints, in work units: in parts (--part), on an engine, or as a job of a cluster (--on)."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import msgspec

from ckptctl.commands.arguments import a_flag, an_option
from ckptctl.commands.struct_options import shown_as
from ckptctl.output import Output
from ckptctl.render import Block, Screen
from ckptctl.session import Session
from ckptctl.targets import Target
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint, PartlyDone
from ckptstore.fleet import Part, Unit, UnitResult, UnitResults, open_engine, run_units, units_of
from ckptstore.format.documents import FORMAT, digest
from ckptstore.names import UNITS_PREFIX
from ckptstore.stores.checks import measure_store

_SAMPLE_BYTES = 64 << 20
_CLUSTERS = {"slurm": ["sbatch"], "k8s": ["kubectl", "create", "-f", "-"]}
_JOBS = {
    "slurm": """\
#!/bin/bash
#SBATCH --job-name=ckptctl
#SBATCH --partition={place}
#SBATCH --array=1-{parts}
#SBATCH --requeue
exec {line}
""",
    "k8s": """\
apiVersion: batch/v1
kind: Job
metadata: {{generateName: ckptctl-, namespace: {place}}}
spec:
  completions: {parts}
  parallelism: {parts}
  completionMode: Indexed
  backoffLimitPerIndex: 3
  template:
    spec:
      restartPolicy: Never
      containers:
        - name: ckptctl
          image: ckptd:{version}
          command: {command}
          env: [{{name: JOB_COMPLETIONS, value: "{parts}"}}]
          envFrom: [{{secretRef: {{name: ckptd, optional: true}}}}]
""",
}
_ADDED: dict[str, Any] = {
    "on": Annotated[
        str | None,
        an_option(
            (
                "local:8, dask://HOST:8786, ray://HOST:10001; slurm:PARTITION[:PARTS] and k8s:NAMESPACE[:PARTS] "
                "submit a job, or print it."
            ),
            "ENGINE",
        ),
    ],
    "part": Annotated[str | None, an_option("Only this part; auto: by a Slurm array or an Indexed Job.", "I/N")],
    "dry_run": Annotated[bool, a_flag("Only show units, bytes and an estimate.", "--dry-run")],
}


def in_units(
    takes: str, choose: Callable[..., Iterable[Checkpoint] | Iterable[str]], **always: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands: adds --on, --part and, if the command has none, --dry-run.

    takes: the parameter that names checkpoints or runs. choose: called with the session and all parameters; returns
    checkpoints, or the names of runs. always: values of parameters in every unit.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        def wrapper(session: Session, on: str | None = None, part: str | None = None, **given: Any) -> None:
            shows = given["dry_run"] if "dry_run" in own else given.pop("dry_run", False)
            if not (on or part or (shows and "dry_run" not in own)):
                command(session, **given)
            elif on and on.partition(":")[0] in _CLUSTERS:
                _submit(session, on, shows)
            else:
                chosen = [
                    Unit((one,), 0) if isinstance(one, str) else Unit((one.id,), one.needed_bytes)
                    for one in choose(session, **given)
                ]
                given |= always
                job = digest(repr((command.__name__, sorted({**given, "rate": None}.items()))).encode())
                results = UnitResults(session.store("--on"), f"{UNITS_PREFIX}{job}/")
                call = partial(_call, wrapper, takes, given, results.store.url, results.folder)
                _work(session, call, given, results, on, part, shows, chosen)

        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in _ADDED.items()
            if name not in own
        ]
        return shown_as(wrapper, command, [*own.values(), *added])

    return decorate


def _call(command: Callable[..., None], takes: str, given: dict[str, Any], url: str, folder: str, unit: Unit) -> None:
    """Call a command for one unit, in any process that reaches the store; its result is durable on return."""
    screen, problem = _Keeping(Output.JSON, color=False, quiet=True), ""
    targets = list(unit.targets) if "@" in unit.targets[0] else unit.targets[0]
    with closing(Session(lambda: Target(url, is_daemon=False), screen)) as session:
        try:
            command(session, **given | {takes: targets})
        except NoCheckpoint:  # deleted in the meantime
            if unit.targets[1:]:
                for target in unit.targets:
                    _call(command, takes, given, url, folder, Unit((target,), 0))
                return
        except CorruptObject as error:
            if screen.body is None:
                raise
            problem = str(error)
        UnitResults(session.store("--on"), folder).write(
            UnitResult(
                format=FORMAT, kind="unit", targets=unit.targets, body=screen.body, ids=screen.ids, problem=problem
            )
        )


class _Keeping(Screen):
    """Keeps the result of a command in place of printing it."""

    body: Any = None
    ids: tuple[str, ...] = ()

    def emit(self, body: object, ids: Iterable[str], blocks: Iterable[Block], none: str = "") -> None:
        """Keep it."""
        self.body, self.ids = msgspec.to_builtins(body, str_keys=True), tuple(ids)


def _work(
    session: Session,
    call: Callable[[Unit], None],
    given: dict[str, Any],
    results: UnitResults,
    on: str | None,
    part: str | None,
    shows: bool,
    chosen: list[Unit],
) -> None:
    mine = Part.parse(part or "1/1", os.environ)
    done = {target for result in results.read(session.clock()) for target in result.targets}
    left = [*units_of(unit for unit in chosen if unit.targets[0] not in done and mine.has(unit.targets[0]))]
    total, failed = sum(unit.bytes for unit in left), []
    with open_engine(on or "local:1") as (executor, slots):
        rate = human.parse_size(given["rate"]) / mine.of if given.get("rate") else 0.0
        if shows:
            speed = rate or slots * measure_store(results.store, session.clock, _SAMPLE_BYTES).read_bytes_per_s
            body = {"units": len(left), "targets": sum(len(unit.targets) for unit in left), "bytes": total}
            facts = {name: f"{count:,}" for name, count in body.items()}
            facts["estimate"] = human.duration(total / speed)
            session.screen.emit({**body, "seconds": total / speed}, [], [facts])
            return
        if rate:
            given["rate"] = f"{rate / slots / 1000:.3f}kB"
        with session.screen.progress("working", total) as progress:
            for unit, error in run_units(executor, call, left):
                progress(unit.bytes)
                if error is not None:
                    failed.append(f"{unit.targets[0]}: {error}")
    found = results.read(session.clock())
    missing = {unit.targets[0] for unit in chosen}.difference(*(result.targets for result in found))
    if missing:
        session.screen.note(f"{human.count(len(missing), 'target')} left, to other parts or to a repetition")
        found = [result for result in found if mine.has(result.targets[0])]
    bodies = [b for r in found if r.body is not None for b in (r.body if isinstance(r.body, list) else [r.body])]
    problems = [f"{', '.join(result.ids)}: {result.problem}" for result in found if result.problem]
    ids = [id for result in found for id in result.ids]
    session.screen.emit(bodies, ids, [f"{human.count(len(found), 'unit')} done", *problems, *failed])
    if failed:
        raise PartlyDone(f"{human.count(len(failed), 'unit')} failed: {failed[0]}", "Repeat the call: it continues")
    if not missing:
        results.forget()
    if problems:
        raise CorruptObject(f"{human.count(len(problems), 'unit')} with damage: {problems[0]}", "Restores skip it")


def _submit(session: Session, on: str, shows: bool) -> None:
    """Submit the command as a job that has a task for each part; without the cluster's client, print the job."""
    kind, place, parts = f"{on}:8".split(":")[:3]
    kept = [text for text in session.arguments if text not in ("--on", on, f"--on={on}", "--dry-run")]
    command = ["ckptctl", *kept, "--store", session.store("--on").url, "--part", "auto"]
    text = _JOBS[kind].format(
        place=place, parts=parts, line=shlex.join(command), command=json.dumps(command), version=version("ckptd")
    )
    if not shows and shutil.which(_CLUSTERS[kind][0]):
        done = subprocess.run(_CLUSTERS[kind], input=text, text=True, capture_output=True)
        if done.returncode:
            raise InvalidRequest(f"the job was refused: {done.stderr.strip()}", "--dry-run prints it")
        text = done.stdout.strip()
    session.screen.emit(text, [], text.splitlines())
