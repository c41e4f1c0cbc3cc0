"""The tables of `plan`. Every assumption of a formula is shown beside its result."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.render import Block, Facts, Row, Table
from ckptplan.plan import Bandwidth, Interval, Plan, Ranks, Restore
from ckptplan.retained import Retained
from ckptplan.work import TrainingTime
from ckptstore import human

Pairs = Iterator[tuple[str, str]]

_GIB = 1 << 30


def plan_blocks(plan: Plan) -> Iterator[Block]:
    """All parts that were planned."""
    experts = f", {_number(plan.model.expert_parameters)} of experts" if plan.model.expert_parameters else ""
    yield f"{plan.model.source}: {_number(plan.model.parameters)} parameters{experts}"
    yield ""
    yield _term_table(plan)
    yield ""
    yield "SIZE"
    yield Facts([*_sizes(plan)])
    yield ""
    yield from _rank_blocks(plan.ranks)
    for title, pairs in (
        ("BANDWIDTH", [*_bandwidth(plan.sync, "to be durable"), *_bandwidth(plan.background, "in the background")]),
        ("RESTORE", [*_restore(plan.restore)]),
        ("INTERVAL", [*_interval(plan.interval)]),
        ("TRAINING", [*_training(plan), *_retained(plan.retained)]),
        ("STORE", [*_requests(plan)]),
    ):
        if pairs:
            yield ""
            yield title
            yield Facts(pairs)


def _term_table(plan: Plan) -> Table:
    columns = ("STATE", "TYPE", ">BYTES PER PARAMETER", ">SIZE", ">STORED SHARE")
    rows = [
        Row(
            (
                term.name,
                term.dtype or ("several" if term.bytes_per_parameter else "not saved"),
                f"{term.bytes_per_parameter:.4g}",
                _size(round(term.bytes_per_parameter * plan.model.parameters)),
                f"{term.compressed:.3g}" if term.bytes_per_parameter else "",
            )
        )
        for term in plan.terms
    ]
    rows.append(Row(("total", "", f"{plan.bytes_per_parameter:.4g}", _size(plan.size.raw_bytes), "")))
    return Table(columns, rows)


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
    columns = ("WRITES", ">RANKS", "WHICH", ">EACH, RAW")
    rows = [Row((w.what, f"{w.ranks:,}", w.which, human.size(round(w.bytes_per_rank)))) for w in ranks.writers]
    yield Table(columns, rows)
    yield ""
    layout = ranks.layout
    degrees = " ".join(f"{name}={getattr(layout, name)}" for name in ("dp", "tp", "pp", "ep"))
    yield "RANKS"
    yield Facts(
        [
            ("layout", f"{degrees} {layout.sharding}: {human.count(ranks.world_size, 'rank')}, "
             f"{human.count(ranks.nodes, 'node')}"),
            ("files", f"{ranks.files:,}, the largest {human.size(ranks.largest_raw_bytes)} raw, "
             f"{human.size(ranks.largest_stored_bytes)} stored"),
            ("host memory for slots", f"{human.size(ranks.host_bytes_per_rank)} per rank at most, "
             f"{human.size(ranks.host_bytes_per_node)} per node at most"),
        ]
    )  # fmt: skip


def _bandwidth(found: Bandwidth | None, what: str) -> Pairs:
    if found is not None:
        rates = f"{_rate(found.aggregate)} in all, {_rate(found.per_writer)} for the rank that writes the most"
        yield f"{what} within {human.duration(found.seconds)}", rates


def _restore(found: Restore) -> Pairs:
    yield "readers", human.count(found.readers, "rank")
    alone = _size(found.bytes_each_for_itself) + _within(found.seconds_each_for_itself)
    yield "each reads for itself", alone
    yield "replicas share reads", _size(found.bytes_shared) + _within(found.seconds_shared)


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
    found: TrainingTime | None = plan.training
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


def _longer(seconds: float, found: TrainingTime) -> str:
    """A duration, and how much longer it is than the steps alone."""
    more = f" ({seconds / found.productive_s - 1:+.2%})" if found.productive_s else ""
    return f"{human.age(seconds)}{more}"


def _retained(found: Retained | None) -> Pairs:
    if found is not None:
        yield "checkpoints kept", f"{found.num_kept:,} of {found.num_saves:,}"
        price = "" if found.price_per_month is None else f", {found.price_per_month:,.2f} per month"
        yield "stored at the end", f"{_size(found.stored_bytes)}{price}"


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


def _number(count: int) -> str:
    return f"{count:,}"
