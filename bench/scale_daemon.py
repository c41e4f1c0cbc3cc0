"""How the cost of a daemon grows with the checkpoints: its real index, listings and retention over a virtual store.

The store holds synthetic outcomes, a thousand per run, or all in one run. The daemon reads all of them, looks again
without and with a change, answers from its index, and plans a retention. Requests take virtual time, processor time
counts as measured, and the index is a real SQLite file. Each size runs in a fresh process, so that its memory is its
own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import log
from pathlib import Path
from statistics import quantiles
from unittest.mock import patch

from bench.index import made_up
from bench.report import Goal, Report
from bench.scale import BEGAN_AT, memory
from bench.virtual_store import Clock, Limits, Requests, VirtualStore, lanes_of
from ckptapi.bodies import MAX_PAGE
from ckptapi.listing import Filter, Sort
from ckptd.index import Database, Index, Listing
from ckptd.metrics import Metrics
from ckptd.pages.queries import RunOrder, RunPageQuery, paged
from ckptd.pages.routes import MOST_CHECKPOINTS
from ckptd.pages.runs import chosen_runs, retention_view, run_view
from ckptd.services import Catalog, Freshness, StoreSync
from ckptstore import threads
from ckptstore.commits import catalog, hidden
from ckptstore.format.parsing import seal
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.policy import evaluate
from ckptstore.retention.pruning import Prune, plan_prune, plan_prunes
from ckptstore.run import Run

SIZES = {True: (1000, 10_000, 100_000), False: (1000, 10_000, 100_000, 1_000_000)}
ONE_RUN = {True: (1000, 10_000), False: (1000, 10_000, 100_000)}
PER_RUN = 1000
ASKED = 100
PLANNED = 1_000_000
"""Checkpoints that are in all retention plans of single runs together: of large runs there are fewer."""
PAGE = 100
ANSWER_S, POWER = 0.01, 1.1
ANSWERS = ("latest", "page of the listing", "policy evaluation")
POLICY = Policy(keep_last=10, keep_every=100_000, keep_daily=7)


def measure(quick: bool) -> Report:
    """Simulate daemons of growing stores."""
    many = {size: in_fresh_process(size, PER_RUN) for size in SIZES[quick]}
    one = {size: in_fresh_process(size, size) for size in ONE_RUN[quick]}
    answers = [many[SIZES[quick][-1]][f"{name} p99 s"] for name in ANSWERS]
    # Processor time of the small sizes is that of warm caches.
    steady = [name for name in many[PER_RUN] if "processor" not in name and "p99" not in name]
    steepest = max(exponent(found, name) for found in (many, one) for name in steady)
    facts = {("", size): found for size, found in many.items()} | {(" in one run", size): one[size] for size in one}
    return Report(
        bench="scale-daemon",
        what="checkpoints, 1,000 per run or all in one; 20 ms, 1,000 keys per page, 5,500 GET per second and folder",
        columns=("", *(f"{size:,}" for size in many), "power", *(f"{size:,} in one run" for size in one), "power"),
        rows=[
            (
                name,
                *(f"{found[name]:.4g}" for found in many.values()),
                f"{exponent(many, name):.2f}",
                *(f"{found[name]:.4g}" for found in one.values()),
                f"{exponent(one, name):.2f}",
            )
            for name in many[PER_RUN]
        ],
        goals=[
            Goal("slowest answer, p99", "10 ms", max(answers) / ANSWER_S, 1.0, "at most"),
            Goal("power of growth", "linear", steepest, POWER, "at most"),
        ],
        facts={f"{name}, {size}{how}": value for (how, size), found in facts.items() for name, value in found.items()},
    )


def exponent(found: dict[int, dict[str, float]], name: str) -> float:
    """The power of the number of checkpoints with which a cost grew in the last step."""
    before, last = list(found)[-2:]
    values = found[before][name], found[last][name]
    return log(values[1] / values[0]) / log(last / before) if min(values) > 0 else 0.0


def in_fresh_process(size: int, per_run: int) -> dict[str, float]:
    """The result of `simulate`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.scale_daemon", folder, str(size), str(per_run)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def simulate(folder: Path, size: int, per_run: int) -> dict[str, float]:
    """A daemon with `size` checkpoints, `per_run` in each run, and its index in `folder`."""
    clock = Clock(BEGAN_AT)
    store = filled_store(clock, size, per_run)
    database = Database(f"sqlite:///{folder}/index.db", 1)
    index = Index(database)
    index.adopt(store.url, clock())
    freshness = Freshness(clock, 1e9)
    sync = StoreSync(store, index, freshness, Metrics(), clock)
    answers = Catalog(index, Listing(database), freshness, store.url)
    run = Run(store, run_name(0), clock)
    asked = min(ASKED, PLANNED // per_run)
    references = [Reference(run_name(number * (size // per_run) // asked), None) for number in range(asked)]
    found: dict[str, float] = {}

    def timed(name: str, *work: Callable[[], object]) -> None:
        store.requests = Requests()
        began, spent = clock.now, clock.spent
        clock.resume(began)
        each_s = []
        for each in work:
            before = clock.now
            each()
            clock.work()
            each_s.append(clock.now - before)
        found[f"{name} s"] = (clock.now - began) / len(work)
        found[f"{name} p99 s"] = quantiles(each_s * 2, n=100, method="inclusive")[-1]  # of one sample: itself
        found[f"{name} processor s"] = (clock.spent - spent) / len(work)
        found[f"{name} requests"] = store.requests.count.total() / len(work)

    with in_virtual_time(clock):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        held = memory("VmRSS")
        timed("first scan", sync.run_once)
        timed("refresh", sync.run_once)
        commit(run, 1)
        timed("refresh after a commit", sync.run_once)
        newest = commit(run, 2)
        timed("notification", lambda: sync.notify(run.name, newest))
        timed("latest", *(partial(index.find, reference) for reference in references))
        timed("page of the listing", *(lambda: answers.page(Filter(), Sort.RUN, None, PAGE) for _ in range(ASKED)))
        names = [reference.run for reference in references]
        timed(
            "list of runs",
            *(lambda: paged(chosen_runs(answers.runs(), "", RunOrder.NAME, {}), 1) for _ in range(ASKED)),
        )
        timed("page of a run", *(partial(page_of, answers, Run(store, name, clock)) for name in names))
        timed("retention plan of a run", *(partial(plan_prune, Run(store, name, clock), POLICY) for name in names))
        listed = [answers.page(Filter(run=name), Sort.RUN, None, MAX_PAGE).checkpoints for name in names]
        timed("policy evaluation", *(partial(evaluate, POLICY, each, {}, clock.now) for each in listed))
        timed("plan of a prune across runs", lambda: plan_prunes(store, Prune(POLICY), clock))
        peak = memory("VmHWM") - held
    database.close()
    return found | {"memory bytes": peak, "index bytes": Path(folder, "index.db").stat().st_size}


def page_of(answers: Catalog, run: Run) -> None:
    """The content of the page of a run, without its template."""
    found = answers.page(Filter(run=run.name), Sort.RUN, None, MOST_CHECKPOINTS).checkpoints
    view = retention_view(run)
    run_view(found, RunPageQuery(), run.clock())
    view.reasons(found)
    view.evaluate(found, POLICY)


def filled_store(clock: Clock, size: int, per_run: int) -> VirtualStore:
    """A store with the outcomes of committed checkpoints."""
    store = VirtualStore(clock, Limits())
    for number in range(size // per_run):
        run = Run(store, run_name(number), clock)
        for step in range(per_run):
            attempt = Attempt(step * 1000, new_ulid(clock()))
            store.place(run.keys.outcome(attempt), seal(made_up(run.name, attempt, clock() - per_run + step)))
    return store


def commit(run: Run, number: int) -> Attempt:
    """A new checkpoint of a run, whose outcome a trainer has just written."""
    attempt = Attempt(10**9 + number, new_ulid(run.clock()))
    assert isinstance(run.store, VirtualStore)
    run.store.place(run.keys.outcome(attempt), seal(made_up(run.name, attempt, run.clock())))
    return attempt


def run_name(number: int) -> str:
    """Name of one run."""
    return f"run-{number:05d}"


@contextmanager
def in_virtual_time(clock: Clock) -> Iterator[None]:
    """The daemon's threads are those of the simulation."""
    with ExitStack() as stack:
        for module in (catalog, hidden, threads):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", lanes_of(clock)))
        yield


if __name__ == "__main__":
    print(json.dumps(simulate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
