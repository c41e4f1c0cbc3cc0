"""probe, doctor, reindex: checks of the store and of the installation, and the repair of a daemon's index."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated

import typer

from ckptctl.output import Unhealthy
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.errors import CkptError, DaemonUnavailable, Forbidden, Unavailable
from ckptstore.stores.checks import StoreReport
from ckptstore.values import Record

_SKEW_S = 10.0
_AGAIN_S = 0.5
_REQUIREMENTS = "docs/decisions/0002 lists the requirements on stores"
_STYLES = {"warning": "yellow", "wrong": "red", "skipped": "dim"}


class HealthFinding(Record):
    """The result of one check."""

    check: str
    verdict: str
    """ok, warning, wrong, or skipped: not checked because of what is wrong before it, or for lack of a scope."""
    found: str
    advice: str = ""

    @classmethod
    def of(cls, check: str, good: bool, found: str, advice: str = "", bad: str = "wrong") -> HealthFinding:
        """ok, or bad with the advice."""
        return cls(check=check, verdict="ok" if good else bad, found=found, advice="" if good else advice)


def probe(session: Session) -> None:
    """Check a store with a few small objects: conditional writes, listings, its clock, its speed.

    With --url, the daemon checks its store. The objects are deleted afterwards. Exit code 1 if a check fails.
    """
    found = session.operator.probe()
    failed = [check for check in found.checks if not check.ok]
    session.screen.emit(found, [check.name for check in failed], _probe_blocks(found))
    if failed:
        raise Unhealthy(
            f"{found.store} fails {failed[0].name!r}: {failed[0].detail.rstrip('.')}",
            _REQUIREMENTS,
        )


def doctor(
    session: Session,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Only wait until the daemon or store responds, at most this long: 0s, 30s, 5m."
        ),
    ] = None,
) -> None:
    """Check configuration, daemon, store, clocks and versions, with advice for what is wrong.

    After the first failure, checks that depend on it are skipped. Exit code 1 if a check fails. The store is checked as
    by ckptctl probe.
    With --wait, it needs no token and writes nothing to the store. Exit code 0 as soon as the daemon is ready or the
    store can be listed, and 7 if neither happens in time.
    """
    if wait is not None:
        _wait(session, human.parse_duration(wait))
        return
    findings = list(_examine(session))
    session.screen.emit(findings, [f.check for f in findings if f.verdict != "ok"], _findings_blocks(findings))
    wrong = [finding for finding in findings if finding.verdict == "wrong"]
    if wrong:
        raise Unhealthy(f"{wrong[0].check}: {wrong[0].found.rstrip('.')}", wrong[0].advice)


def _wait(session: Session, most_s: float) -> None:
    until, target = session.clock() + most_s, session.target.url
    while True:
        try:
            if session.target.is_daemon:
                _ask_daemon(session)
            else:
                session.source.runs()
            break
        except Unavailable:
            if session.clock() >= until:
                raise
            time.sleep(_AGAIN_S)
    session.screen.emit({"target": target, "ready": True}, [target], [f"{target} is ready"])


def _ask_daemon(session: Session) -> None:
    ready = session.daemon("doctor").readiness()
    if not ready.ready:
        states = {"database": ready.database, "store": ready.store}
        wrong = [f"{part}: {state}" for part, state in states.items() if state != "ok"]
        raise DaemonUnavailable(
            f"ckptd at {session.target.url} is not ready: {'; '.join(wrong) or 'it is shutting down'}",
            "ckptctl doctor has advice",
        )


def reindex(session: Session) -> None:
    """Rebuild the index of a daemon from the store.

    No data is lost: the index is a cache of the store.
    """
    found = session.daemon("reindex").reindex()
    text = f"Indexed {human.count(found.checkpoints, 'checkpoint')} of {human.count(found.runs, 'run')}"
    session.screen.emit(found, [], [text])


def _examine(session: Session) -> Iterator[HealthFinding]:
    checks = [("store", _look_at_store), ("runs", _look_at_runs)]
    kind = "store"
    if session.target.is_daemon:
        kind, checks = "daemon", [("daemon", _look_at_daemon), ("versions", _compare), *checks]
    yield HealthFinding.of("configuration", True, f"the {kind} at {session.target.url}")
    first = ""
    for title, check in checks:
        if first:
            yield HealthFinding(check=title, verdict="skipped", found=f"not checked, because of: {first}")
            continue
        try:
            for finding in check(session):
                yield finding
                first = first or (finding.check if finding.verdict == "wrong" else "")
        except Forbidden as error:
            found = "needs scope admin" if check is _look_at_store else error.message
            yield HealthFinding(check=title, verdict="skipped", found=f"not checked: {found}")
        except CkptError as error:
            first = first or title
            yield HealthFinding.of(title, False, error.message, error.hint)


def _look_at_daemon(session: Session) -> Iterator[HealthFinding]:
    ready = session.daemon("doctor").readiness()
    advice = "The daemon recovers when the cause is fixed; docs/how-to/daemon.md lists causes"
    for part, state in (("daemon's database", ready.database), ("daemon's view of the store", ready.store)):
        yield HealthFinding.of(part, state == "ok", state, advice)
    if ready.leaving:
        yield HealthFinding.of("daemon", False, "it is shutting down", bad="warning")


def _compare(session: Session) -> Iterator[HealthFinding]:
    about = session.daemon("doctor").about()
    ours = version("ckptd")
    advice = "Different versions usually work together; if there are errors, upgrade the older one"
    found = f"daemon {about.version}, here {ours}"
    yield HealthFinding.of("versions", about.version == ours, found, advice, bad="warning")
    if about.at is not None:
        skew = about.at - session.clock()
        found = f"the daemon's clock differs from this machine's by {skew:+.0f} s"
        advice = "Leases and retention depend on the clock: run NTP on both machines"
        yield HealthFinding.of("clocks", abs(skew) < _SKEW_S, found, advice)


def _look_at_store(session: Session) -> Iterator[HealthFinding]:
    for check in session.operator.probe().checks:
        found = human.duration(check.seconds) if check.ok else check.detail
        yield HealthFinding.of(f"store: {check.name}", check.ok, found, _REQUIREMENTS)


def _look_at_runs(session: Session) -> Iterator[HealthFinding]:
    runs = session.source.runs()
    yield HealthFinding.of("runs", True, human.count(len(runs), "run") if runs else "none yet")


def _probe_blocks(found: StoreReport) -> Iterator[Block]:
    rows = [
        Row(
            (check.name, "ok" if check.ok else "wrong", f"{check.seconds * 1000:.0f} ms", check.detail),
            "" if check.ok else "red",
        )
        for check in found.checks
    ]
    yield Table(("CHECK", "RESULT", ">TOOK", "DETAIL"), rows)
    yield ""
    result = "passes" if found.ok else "fails"
    evidence = ("STORE", "TRIED WITH", "CREATE-ONLY BY", "ONE WINNER", "PROBE")
    yield Table(evidence, [(found.store, found.client, found.create_only, found.races, result)])
    yield ""
    skew = "unknown" if found.clock_skew_s is None else f"{found.clock_skew_s:+.0f} s from this machine's"
    yield f"{found.store}: clock {skew}"


def _findings_blocks(findings: list[HealthFinding]) -> Iterator[Block]:
    rows = [Row((f.check, f.verdict, f.found), _STYLES.get(f.verdict, "")) for f in findings]
    yield Table(("CHECK", "RESULT", "FOUND"), rows)
    for finding in findings:
        if finding.verdict == "warning":
            yield f"{finding.check}: {finding.found.rstrip('.')}. {finding.advice}".removesuffix(". ")
