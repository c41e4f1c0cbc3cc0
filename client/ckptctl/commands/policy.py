"""policy: the retention policies of runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from ckptapi.listing import is_glob
from ckptctl.commands.arguments import NewestOption, an_argument, an_option
from ckptctl.commands.struct_options import with_options
from ckptctl.render import Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.format.decoding import convert
from ckptstore.format.records import Override, Policy, PolicySet
from ckptstore.retention.policy import check_policies, policy_for
from ckptstore.retention.pruning import Prune

_NAMED = 3

EXAMPLE = """\
default:                     # for runs that no override matches; leave it out: they are never pruned
  keep_last: 5
  keep_every: 1000           # steps
  keep_daily: 7
  keep_best: [val_loss:min:3]
  keep_healthy: 1            # the newest without NaN and Inf
  keep_full: 5               # older ones that stay lose their optimizer state; keep_weights: all keeps every one
  keep_abandoned: 7d         # what training left behind when it went on from an earlier checkpoint; 0s: nothing
overrides:                   # the first that matches a run counts
  - runs: exp-*
    rules: {keep_last: 2, keep_within: 12h, max_bytes: 500GB}
  - runs: team-a/*
    rules: {keep_last: 20}
    max_bytes: 5TB           # all these runs together; the oldest beyond it go, the newest of a run never
  - runs: paper-*
    rules: null              # never pruned; with max_bytes, copies and imports beyond it are refused
grace: 24h                   # between hiding and deleting
max_delete_fraction: 0.5     # the daemon deletes or thins no larger part of a run at once
"""

_PARSERS: dict[str, Callable[[str], float]] = {"s": human.parse_duration, "bytes": human.parse_size}
_WORDS = {"grace": ("grace_s", human.parse_duration)} | {
    field.name.removesuffix("_s"): (field.name, _PARSERS[_unit])
    for field in msgspec.structs.fields(Policy)
    if (_unit := field.type.__metadata__[0].extra["unit"]) in _PARSERS
}
"""Fields that people write with a unit: the field, and the function that reads it."""


def parse_policies(text: str) -> PolicySet:
    """The policies in a file. Raises InvalidRequest."""
    try:
        policies = convert(_in_numbers(yaml.safe_load(text)), PolicySet)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise InvalidRequest(
            f"the file is not a policy file: {message}", "ckptctl policy apply --help has an example"
        ) from error
    check_policies(policies)
    return policies


def write_policies(policies: PolicySet) -> str:
    """The file for these policies."""
    plain = msgspec.to_builtins(policies)
    defaults = {field.name: field.default for field in msgspec.structs.fields(Policy)}
    for rules in (plain["default"], *(override.get("rules") for override in plain["overrides"])):
        for name in list(rules or ()):
            if rules[name] == defaults[name]:
                del rules[name]
    return yaml.safe_dump(plain, sort_keys=False)


def _in_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {}
    for name, item in value.items():
        if name in _WORDS and isinstance(item, str):
            field, parse = _WORDS[name]
            converted[field] = parse(item)
        else:
            converted[name] = _in_numbers(item)
    return converted


_EPILOG = "\b\nA file of policies:\n" + "".join(f"  {line}\n" for line in EXAMPLE.splitlines())
ExpectOption = Annotated[int | None, an_option("Fail unless this version is in force.", "VERSION")]
HistoryReasonOption = Annotated[str, an_option("Reason, for the history.", "TEXT")]


group = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change the retention policies: which checkpoints of which runs stay.\n\n"
    "The rules of the first override whose pattern matches a run apply to it, else the default rules. A checkpoint "
    "stays if any rule keeps it. A daemon applies the policies after each commit and once an hour; without a "
    "daemon, ckptctl prune does. Runs without rules are never pruned.",
)


@group.command("show")
def show(
    session: Session,
    run: Annotated[str | None, an_argument("A run: show the rules that apply to it.", "RUN")] = None,
) -> None:
    """Show the policies in force, as a file for policy apply, and which runs they prune or are blocked for.

    Which checkpoints they delete is shown by ckptctl prune --dry-run.
    """
    body = session.operator.policies()
    if run is not None:
        policy = policy_for(body.policies, run)
        text = write_policies(PolicySet(default=policy)).strip() if policy else f"run {run} is never pruned"
        session.screen.emit(policy, [], text.splitlines())
        if policy is not None:
            _explain_effect(session, run)
        return
    if not body.version:
        session.screen.note("no policies were ever set: nothing is pruned automatically")
    text = f"# version {body.version}\n{write_policies(body.policies)}".strip()
    session.screen.emit(body, [str(body.version)], text.splitlines())
    if body.policies != PolicySet():
        _explain_effect(session)


@group.command("apply", epilog=_EPILOG)
def apply(
    session: Session,
    file: Annotated[Path, an_argument("YAML; - for standard input.", "FILE")],
    expect: ExpectOption = None,
    reason: HistoryReasonOption = "",
) -> None:
    """Replace all policies by those in a file.

    A daemon applies them after each commit and once an hour; without a daemon, ckptctl prune does. Prints what they
    will delete, and where they are blocked.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {file}: {error}") from error
    _change(session, parse_policies(text), expect, reason)


@group.command("set")
@with_options(rules=Policy)
def change_rules(
    session: Session,
    run: Annotated[
        str | None, an_argument("A run, or a pattern with * and ?: set its rules, not the default ones.", "RUN")
    ] = None,
    rules: Any = None,
    reason: HistoryReasonOption = "",
) -> None:
    """Set the rules of some runs, or the default rules.

    The options replace all earlier rules of this RUN; all others stay. The rules that were set last come first: they
    apply to runs that several patterns match. With a pattern, --max-bytes limits all these runs together; without other
    rules nothing is deleted, and copies and imports beyond it are refused. Prints what the policies will delete, and
    where they are blocked, because they would delete or thin more than max_delete_fraction of a run. Fails if the
    policies are changed concurrently.
    """
    if not rules:
        raise InvalidRequest(
            "no rule is set", "Use for example ckptctl policy set --keep 5; ckptctl policy clear removes all policies"
        )
    limit = rules.pop("max_bytes", 0) if run is not None and is_glob(run) else 0
    policy, body = Policy(**rules) if rules else None, session.operator.policies()
    if run is None:
        changed = msgspec.structs.replace(body.policies, default=policy)
    else:
        overrides = (
            Override(runs=run, rules=policy, max_bytes=limit),
            *(override for override in body.policies.overrides if override.runs != run),
        )
        changed = msgspec.structs.replace(body.policies, overrides=overrides)
    _change(session, changed, body.version, reason)


@group.command("clear")
def clear(session: Session, expect: ExpectOption = None, reason: HistoryReasonOption = "") -> None:
    """Remove all policies: nothing is pruned automatically any more.

    policy history keeps them.
    """
    _change(session, PolicySet(), expect, reason)


@group.command("history")
def history(
    session: Session,
    limit: NewestOption = 20,
) -> None:
    """List the versions of the policies, newest first."""
    found = session.operator.policies_history(limit)
    rows = [(str(b.version), human.moment(b.at), b.by, _words(b.policies.default), b.reason) for b in found]
    table = Table((">VERSION", "WHEN", "WHO", "DEFAULT", "REASON"), rows)
    session.screen.emit(found, [str(body.version) for body in found], [table])


def _change(session: Session, policies: PolicySet, expect: int | None, reason: str) -> None:
    expected = expect if expect is not None else session.operator.policies().version
    done = session.operator.change_policies(policies, expected, reason)
    session.screen.emit(done, [str(done.version)], [f"policies, version {done.version}, are in force"])
    if policies != PolicySet():
        _explain_effect(session)


def _explain_effect(session: Session, run: str | None = None) -> None:
    """Note what the policies in force delete, and for which runs they are blocked; and how full their limits are."""
    for override in session.operator.policies().policies.overrides if run is None else ():
        if override.max_bytes:
            team = [name for name in session.source.runs() if fnmatchcase(name, override.runs)]
            used = sum(c.stored_bytes for name in team for c in session.source.checkpoints(name))
            session.screen.note(f"{override.runs}: {human.size(used)} of {human.size(override.max_bytes)} are used")
    try:
        plan = session.operator.plan_prune(Prune(run=run))
    except CkptError as error:
        session.screen.note(f"what they delete is not known: {error}")
        return
    blocked: list[str] = []
    pruned: list[str] = []
    for name, of_run in plan.by_run():
        if of_run.blocked:
            blocked.append(f"blocked: {of_run.blocked}. ckptctl prune {name} shows and confirms the plan")
        elif of_run.affected:
            thinned = f", {len(of_run.thin)} thinned" if of_run.thin else ""
            pruned.append(f"run {name}: {human.count(len(of_run.remove), 'checkpoint')} will be deleted{thinned}")
    for lines in (blocked, pruned):
        for line in lines[:_NAMED]:
            session.screen.note(line)
        if lines[_NAMED:]:
            session.screen.note(f"and {human.count(len(lines) - _NAMED, 'run')} more likewise")


def _words(rules: Policy | None) -> str:
    if rules is None:
        return "keep everything"
    return " ".join(
        f"{field.name}={','.join(value) if isinstance(value, tuple) else value}"
        for field in msgspec.structs.fields(rules)
        if (value := getattr(rules, field.name)) != field.default
    )
