"""plan: sizes, bandwidth, the best interval, training time and price of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, log10, prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ckptctl.commands.arguments import a_checkpoint, an_option
from ckptctl.commands.struct_options import with_options
from ckptctl.completion import run_names
from ckptctl.render import Block, Table, write_file
from ckptctl.session import Session, no_checkpoints
from ckptctl.targets import Target
from ckptplan.history import contents, history
from ckptplan.inputs import PlanInputs
from ckptplan.layout import Sharding
from ckptplan.model import Model, from_config
from ckptplan.plan import Interval, LocalTier, Plan, Ranks, Restore, make_plan
from ckptplan.training import TrainingTime, ettr
from ckptstore import human
from ckptstore.analysis.charts import Point, Tick, plot, svg
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import convert
from ckptstore.format.documents import Manifest
from ckptstore.format.records import SAVE_COST, Policy, SaveCost
from ckptstore.names import check_run
from ckptstore.reading.safetensors import StoredTensor, read_header
from ckptstore.reading.source import read_manifest
from ckptstore.stores.checks import measure_store

_STATE = {"optimizer", "weights", "master", "moments", "grads"}
"""Options that describe a state: a checkpoint has one."""
_MEASURED = 5
"""The newest saves whose cost is read."""


FromOption = Annotated[
    str | None,
    an_option(
        "Plan for this run: contents of its newest checkpoint, and what its saves cost so far.",
        "RUN",
        "--from",
        autocompletion=run_names,
    ),
]
SafetensorsOption = Annotated[Path | None, an_option("A safetensors file, or a folder of them.", "FILE")]
MeasureOption = Annotated[
    str | None, an_option("Measure what one rank writes and reads, with real objects that are removed again.", "STORE")
]
PlotOption = Annotated[Path | None, an_option("Draw the training time ratio over the interval.", "FILE.svg")]


@with_options(rules=Policy, options=PlanInputs)
def plan(
    session: Session,
    checkpoint: Annotated[str | None, a_checkpoint("Plan for the contents of this checkpoint.")] = None,
    from_run: FromOption = None,
    config: Annotated[Path | None, an_option("A Hugging Face config.json.", "FILE")] = None,
    safetensors: SafetensorsOption = None,
    measure: MeasureOption = None,
    measure_size: Annotated[str, an_option("Bytes that --measure writes.", "SIZE")] = "256MB",
    plot: PlotOption = None,
    rules: Any = None,
    options: Any = None,
) -> None:
    """Plan a run's checkpoints before it starts: sizes, bandwidth, memory, the best interval, time and price.

    The model is given by --parameters, --model, the --layers of a transformer, a file, or a checkpoint. Everything
    else is optional; parts without their inputs are left out. docs/how-to/planning.md has the
    formulas and their sources.
    """
    found = _model(session, checkpoint, from_run, config, safetensors)
    if "terms" in found and (described := sorted(options.keys() & _STATE)):
        raise InvalidRequest(
            f"a checkpoint gives the bytes per parameter, so --{described[0]} has no effect", "Leave it out"
        )
    if measure is not None:
        if measure.startswith(("http://", "https://")):
            raise InvalidRequest("--measure needs the URL of a store, not of a daemon", "Give file:///... or s3://...")
        found |= _measured(session, measure, human.quantity(measure_size, "bytes"))
    measured = found.pop("measured", frozenset()) - options.keys()
    policy = Policy(**rules) if rules else None
    made = make_plan(PlanInputs(**{**found, **options, "keep": policy, "measured": measured}))
    if plot is not None:
        write_file(plot, draw(made))
    session.screen.emit(made, [], plan_blocks(made))


def _model(
    session: Session, checkpoint: str | None, run: str | None, config: Path | None, safetensors: Path | None
) -> dict[str, Any]:
    """The inputs that a file or a run gives. Raises InvalidRequest for more than one."""
    if sum(value is not None for value in (checkpoint, run, config, safetensors)) > 1:
        raise InvalidRequest("several models are given", "Give a checkpoint, --from, --config or --safetensors")
    if config is not None:
        try:
            return {"model": from_config(config.read_bytes(), str(config))}
        except OSError as error:
            raise _unreadable(config, error) from error
    if safetensors is not None:
        return _from_safetensors(safetensors)
    if checkpoint is not None:
        found = session.find(checkpoint)
        return _contents(found, read_manifest(session.source, found))
    return _from_run(session, run) if run is not None else {}


def _from_run(session: Session, run: str) -> dict[str, Any]:
    usable = [one for one in session.source.checkpoints(check_run(run)) if one.state is State.COMMITTED]
    if not usable:
        raise no_checkpoints(run, session.source.url)
    manifests = [read_manifest(session.source, one) for one in usable[:_MEASURED]]
    found = history(usable, _costs(manifests))
    measured = {name: getattr(found, name) for name in ("durable_s", "step_s", "stall_s", "slowdown_s")}
    known = {name: value for name, value in measured.items() if value is not None}
    missing = [name.removesuffix("_s") for name in measured if name not in known]
    if missing:
        session.screen.note(f"run {run!r} has no measurement of: {', '.join(missing)}")
    session.screen.note(f"measured over the newest {human.count(found.num_checkpoints, 'checkpoint')} of run {run!r}")
    times = f"{human.duration(found.durable_s)} (median), {human.duration(found.slowest_durable_s)} (slowest)"
    session.screen.note(f"time until durable: {times}; the load of the machine and the store changes it")
    return _contents(usable[0], manifests[0]) | known | {"measured": frozenset(known)}


def _costs(manifests: list[Manifest]) -> Iterator[SaveCost]:
    for manifest in manifests:
        if SAVE_COST in manifest.extensions:
            try:
                yield convert(manifest.extensions[SAVE_COST], SaveCost)
            except msgspec.ValidationError:
                continue  # of another version


def _contents(found: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    model, terms = contents(found, manifest.content)
    # One file of many ranks holds replicated state; otherwise the ranks have distributed it.
    sharding = Sharding.FSDP if found.num_shards > 1 else Sharding.DDP
    return {"model": model, "terms": terms, "dp": found.world_size, "sharding": sharding}


def _from_safetensors(path: Path) -> dict[str, Any]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise InvalidRequest(f"{path} has no safetensors file", "Check the path")
    tensors: list[StoredTensor] = []
    for file in files:
        try:
            tensors += read_header(file)[0]
        except OSError as error:
            raise _unreadable(file, error) from error
    counts = dict.fromkeys(sorted({tensor.dtype for tensor in tensors}), 0)
    for tensor in tensors:
        counts[tensor.dtype] += prod(tensor.shape)
    if not sum(counts.values()):
        raise InvalidRequest(f"{path} has no parameters", "Check the path")
    # Some tensors of another type, such as norms in float32, do not change the size.
    return {
        "model": Model(parameters=sum(counts.values()), source=str(path)),
        "weights": max(counts, key=lambda dtype: counts[dtype]),
    }


def _measured(session: Session, url: str, num_bytes: float) -> dict[str, Any]:
    store = Session(lambda: Target(url, is_daemon=False), session.screen).store("--measure")
    with session.screen.progress("measuring", 2 * int(num_bytes)) as progress:
        speed = measure_store(store, session.clock, int(num_bytes), progress)
    session.screen.note(
        f"one rank writes {human.size(speed.write_bytes_per_s)}/s to {speed.store} and reads "
        f"{human.size(speed.read_bytes_per_s)}/s, with {human.count(speed.num_objects, 'object')}"
    )
    return {"rank_bandwidth": speed.write_bytes_per_s, "rank_read_bandwidth": speed.read_bytes_per_s}


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be read: {error.strerror}", "Check the path")


Pairs = Iterator[tuple[str, str]]

_GIB = 1 << 30


def plan_blocks(plan: Plan) -> Iterator[Block]:
    """All parts that were planned."""
    experts = f", {plan.model.expert_parameters:,} of experts" if plan.model.expert_parameters else ""
    yield f"{plan.model.source}: {plan.model.parameters:,} parameters{experts}"
    yield ""
    rows = [
        (
            term.name,
            term.dtype or ("several" if term.bytes_per_parameter else "not saved"),
            f"{term.bytes_per_parameter:.4g}",
            _size(round(term.bytes_per_parameter * plan.model.parameters)),
            f"{term.compressed:.3g}" if term.bytes_per_parameter else "",
        )
        for term in plan.terms
    ]
    rows.append(("total", "", f"{plan.bytes_per_parameter:.4g}", _size(plan.size.raw_bytes), ""))
    yield Table(("STATE", "TYPE", ">BYTES PER PARAMETER", ">SIZE", ">STORED SHARE"), rows)
    yield ""
    yield "SIZE"
    yield dict(_sizes(plan))
    yield ""
    yield from _rank_blocks(plan.ranks)
    for title, pairs in (
        ("BANDWIDTH", _bandwidths(plan)),
        ("RESTORE", _restore(plan.restore)),
        ("LOCAL TIER", _local(plan.local)),
        ("INTERVAL", _interval(plan.interval)),
        ("TRAINING", _training(plan)),
        ("STORE", _requests(plan)),
    ):
        if facts := dict(pairs):
            yield ""
            yield title
            yield facts


def _sizes(plan: Plan) -> Pairs:
    size = plan.size
    yield "raw", _size(size.raw_bytes)
    yield "compressed", _size(size.compressed_bytes)
    if size.derived_bytes < size.raw_bytes:
        yield (
            "without casts of masters",
            f"{_size(size.derived_bytes)}, compressed {_size(size.derived_compressed_bytes)}",
        )
    yield "stored", f"{_size(size.stored_bytes)}"


def _rank_blocks(ranks: Ranks) -> Iterator[Block]:
    rows = [(w.what, f"{w.ranks:,}", w.which, human.size(round(w.bytes_per_rank))) for w in ranks.writers]
    yield Table(("WRITES", ">RANKS", "WHICH", ">EACH, RAW"), rows)
    yield ""
    layout = ranks.layout
    degrees = " ".join(f"{name}={getattr(layout, name)}" for name in ("dp", "tp", "pp", "ep"))
    yield "RANKS"
    yield {
        "layout": f"{degrees} {layout.sharding}: {human.count(ranks.world_size, 'rank')}, "
        f"{human.count(ranks.nodes, 'node')}",
        "files": f"{ranks.files:,}, the largest {human.size(ranks.largest_raw_bytes)} raw, "
        f"{human.size(ranks.largest_stored_bytes)} stored",
        "host memory for slots": f"{human.size(ranks.host_bytes_per_rank)} per rank at most, "
        f"{human.size(ranks.host_bytes_per_node)} per node at most",
    }


def _bandwidths(plan: Plan) -> Pairs:
    for what, found in (("to be durable", plan.sync), ("in the background", plan.background)):
        if found is not None:
            rates = f"{_rate(found.aggregate)} in all, {_rate(found.per_writer)} for the rank that writes the most"
            yield f"{what} within {human.duration(found.seconds)}", rates


def _restore(found: Restore) -> Pairs:
    yield "readers", human.count(found.readers, "rank")
    yield "each reads for itself", _size(found.bytes_each_for_itself) + _within(found.seconds_each_for_itself)
    yield "replicas share reads", _size(found.bytes_shared) + _within(found.seconds_shared)


def _local(found: LocalTier | None) -> Pairs:
    if found is not None:
        yield "on each node", f"{human.size(found.stored_bytes_per_node)} per checkpoint, with copies of others"
        yield "sent by each node", f"{human.size(found.wire_bytes_per_node)} per save"
        yield "time until durable there", _seconds(found.durable_s)
        yield (
            "restore",
            f"{_seconds(found.restore_own_s)} from the own disk, {_seconds(found.restore_peer_s)} from others",
        )
        if found.absorbed is not None:
            yield "node failures without loss", f"{found.absorbed:.4%}"


def _interval(found: Interval) -> Pairs:
    yield "stall per save", f"{_seconds(found.stall_s)} ({found.stall_source})"
    yield "slowdown per save", _seconds(found.slowdown_s)
    durable = f"{_seconds(found.durable_s)} ({found.durable_source})" if found.durable_s is not None else ""
    yield "time until durable", durable or found.durable_source
    if found.mtbf_s is not None:
        yield "time between failures", f"{human.duration(found.mtbf_s)} ({found.mtbf_source})"
        yield "restart", _seconds(found.restart_s)
        for name, value in (("Young", found.young_s), ("Daly", found.daly_s), ("NVIDIA", found.nvidia_s)):
            yield f"best interval, {name}", "" if value is None else _seconds(value)
        best = "none: a restart takes longer than the time between failures, or saves cost nothing"
        yield "best interval, highest ETTR", best if found.ettr_s is None else _seconds(found.ettr_s)
    if found.chosen_s is not None:
        yield "interval", f"{_seconds(found.chosen_s)} ({found.chosen_source})"
        share = found.write_share
        if share is not None:
            yield "of it, writing", f"{share:.1%}" + (": saves pile up" if share > 1 else "")
        if found.lost_work_s is not None:
            yield "lost work per failure", _seconds(found.lost_work_s)
    if found.ettr is not None:
        yield "effective training time", f"{found.ettr:.2%}"


def _training(plan: Plan) -> Pairs:
    if plan.global_batch is not None:
        yield "global batch", human.count(plan.global_batch, "sample")
    if plan.steps is not None:
        yield "steps", f"{plan.steps:,}"
    found, kept = plan.training, plan.retained
    if found is None:
        return
    yield "steps alone", human.age(found.productive_s)
    saves = human.count(found.num_saves, "save")
    yield "with saves", f"{_longer(found.without_failures_s, found)}, {saves}"
    if found.with_failures_s is not None and found.num_failures is not None:
        lost, restarts = human.duration(found.lost_s or 0.0), human.duration(found.restart_s or 0.0)
        parts = f"{found.num_failures:.1f} failures, {lost} of work lost, {restarts} of restarts"
        yield "with failures", f"{_longer(found.with_failures_s, found)}: {parts}"
    elif plan.interval.mtbf_s is not None:
        yield "with failures", "no progress: more is lost than done between failures"
    if kept is not None:
        yield "checkpoints kept", f"{kept.num_kept:,} of {kept.num_saves:,}"
        price = "" if kept.price_per_month is None else f", {kept.price_per_month:,.2f} per month"
        yield "stored at the end", f"{_size(kept.stored_bytes)}{price}"


def _longer(seconds: float, found: TrainingTime) -> str:
    """A duration, and how much longer it is than the steps alone."""
    more = f" ({seconds / found.productive_s - 1:+.2%})" if found.productive_s else ""
    return f"{human.age(seconds)}{more}"


def _requests(plan: Plan) -> Pairs:
    found = plan.requests
    yield "PUT per save", f"{found.puts_per_save:,}{_per_second(found.puts_per_s, found.puts_limit_per_s)}"
    yield "GET per restore", f"{found.gets_per_restore:,}{_per_second(found.gets_per_s, found.gets_limit_per_s)}"
    if plan.termination_grace_period_s is not None:
        yield "terminationGracePeriodSeconds", str(plan.termination_grace_period_s)


def _per_second(rate: float | None, limit: int) -> str:
    if rate is None:
        return ""
    verdict = "" if rate <= limit else ", too many"
    return f", {rate:,.0f} per second (S3 serves {limit:,} per prefix{verdict})"


def _within(seconds: float | None) -> str:
    return "" if seconds is None else f" in {_seconds(seconds)}"


def _size(count: int) -> str:
    """Bytes; from 1 GiB on with two decimals, as tables of models have them."""
    return f"{count / _GIB:,.2f} GiB" if count >= _GIB else human.size(count)


def _rate(bytes_per_s: float) -> str:
    return f"{human.size(round(bytes_per_s))}/s"


def _seconds(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.3g}s"
    return human.duration(seconds)


_POINTS = 200
_SPREAD = 5.0
"""The curve extends from the shortest interval divided by this to the longest one times this."""
_TICKS_S = (0.1, 0.5, 2, 10, 30, 120, 600, 1800, 7200, 28_800, 86_400)


def draw(plan: Plan) -> str:
    """The SVG. Raises InvalidRequest for a plan without failures or without an interval."""
    found = plan.interval
    if found.mtbf_s is None or found.chosen_s is None:
        raise InvalidRequest(
            "there is nothing to plot without failures and an interval",
            "Give --mtbf, --failure-rate or --failures, and --interval if saves cost nothing",
        )
    mtbf_s, durable_s = found.mtbf_s, found.durable_s or 0.0

    def at(seconds: float, title: str = "") -> Point:
        return Point(log10(seconds), ettr(seconds, found.cost_s, mtbf_s, found.restart_s, durable_s), title)

    known = [("Young", found.young_s), ("Daly", found.daly_s), ("ETTR", found.ettr_s), ("interval", found.chosen_s)]
    marks = _merged([(name, value) for name, value in known if value and isfinite(value)])
    low, high = marks[0][1] / _SPREAD, marks[-1][1] * _SPREAD
    curve = [at(low * (high / low) ** (i / _POINTS)) for i in range(_POINTS + 1)]
    names = [f"{name}: {human.duration(value)}" for name, value in marks]
    lines = [curve, *([at(value, name)] for name, (_, value) in zip(names, marks, strict=True))]
    ticks = [Tick(log10(seconds), _short(seconds)) for seconds in _TICKS_S if low <= seconds <= high]
    drawn = plot(lines, lambda ratio: f"{100 * ratio:.4g} %", width=720, height=380, x_ticks=ticks)
    best = f"{found.ettr:.2%}" if found.ettr is not None else ""
    title = f"Effective training time {best} with a save every {human.duration(found.chosen_s)}"
    return svg(title, drawn, ["by interval between saves", *names], [_assumptions(plan)])


def _merged(marks: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Marks by interval, with those that are within 3 % of each other in one."""
    found: list[tuple[str, float]] = []
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        if found and value <= 1.03 * found[-1][1]:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, value))
    return found


def _assumptions(plan: Plan) -> str:
    found = plan.interval
    durable = "" if found.durable_s is None else f", durable after {human.duration(found.durable_s)}"
    cost = f"a save costs {found.cost_s:.3g} s{durable}, restart {human.duration(found.restart_s)}"
    return f"{plan.model.source}: failures every {human.duration(found.mtbf_s or 0.0)}, {cost}"


def _short(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
