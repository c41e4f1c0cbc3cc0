"""The plan of a run's checkpoints, from its inputs. Pure; docs/how-to/planning.md explains every key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from math import ceil, floor, inf, isfinite
from typing import ParamSpec

from ckptplan.inputs import PlanInputs
from ckptplan.layout import Layout, Writers, bytes_read, num_files, rank_bytes, writers
from ckptplan.model import Model, Term, derivable, per_parameter
from ckptplan.training import DAY_S, TrainingTime, best_interval, daly, ettr, nvidia, training_time, young
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Best, Policy
from ckptstore.names import Attempt
from ckptstore.retention.policy import evaluate
from ckptstore.values import Record

_MOST_SAVES = 200_000
_ULID = "0" * 26


class Retained(Record):
    """The storage use at the end of a run."""

    num_saves: int
    num_kept: int
    stored_bytes: int
    """Every checkpoint counts whole: savings by references to earlier checkpoints are not in it."""
    price_per_month: float | None
    """Price of GB-month × stored GB (10^9 bytes)."""


def retained(
    policy: Policy | None, num_saves: int, interval_s: float, step_s: float, stored_bytes: int, price: float | None,
    optimizer_bytes: int = 0,
) -> Retained:  # fmt: skip
    """Evaluate the policy at the end of a run that saved at even intervals. policy None: everything is kept.

    The best checkpoints by a metric are assumed to be the oldest, which gives the upper bound. price: of a GB-month.
    optimizer_bytes: those of stored_bytes that thinning frees.
    Raises InvalidRequest for more saves than can be evaluated.
    """
    kept, thinned = num_saves, 0
    if policy is not None:
        if num_saves > _MOST_SAVES:
            raise InvalidRequest(
                f"{num_saves:,} saves are too many to apply rules to", f"Give --interval for at most {_MOST_SAVES:,}"
            )
        metrics = {best.metric: best.highest for best in map(Best.parse, policy.keep_best)}
        saves = []
        for number in range(num_saves, 0, -1):
            at = DAY_S + number * interval_s  # a time of 0 would count as unknown
            saves.append(
                Checkpoint(
                    run="plan",
                    attempt=Attempt(floor(number * interval_s / step_s), _ULID),
                    state=State.COMMITTED,
                    committed_at=at,
                    written_at=at,
                    stored_bytes=stored_bytes,
                    optimizer_bytes=optimizer_bytes,
                    metrics={name: float(-number if highest else number) for name, highest in metrics.items()},
                )
            )
        decided = evaluate(policy, saves, {}, DAY_S + num_saves * interval_s)
        stay = [decision for decision in decided if decision.reasons]
        kept, thinned = len(stay), sum(decision.thins for decision in stay)
    total = kept * stored_bytes - thinned * optimizer_bytes
    monthly = None if price is None else price * total / 1e9
    return Retained(num_saves=num_saves, num_kept=kept, stored_bytes=total, price_per_month=monthly)


PUTS_PER_PREFIX = 3_500
GETS_PER_PREFIX = 5_500
"""Requests per second and prefix that S3 serves. Source: AWS, best practices of S3."""
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000
_SPARE_S = 5

_P = ParamSpec("_P")


class Size(Record):
    """Bytes of one checkpoint."""

    raw_bytes: int
    compressed_bytes: int
    derived_bytes: int
    """Raw, without weights that are casts of their masters."""
    derived_compressed_bytes: int
    stored_bytes: int
    """With the inputs compress and dedup_casts."""


class Ranks(Record):
    """Who writes what."""

    layout: Layout
    world_size: int
    nodes: int
    writers: list[Writers]
    files: int
    """Shard files: ranks that write."""
    largest_raw_bytes: int
    """The share of the rank that writes the most."""
    largest_stored_bytes: int
    host_bytes_per_rank: int
    """Memory for the slots."""
    host_bytes_per_node: int


class Bandwidth(Record):
    """Bandwidth that saves need, in bytes per second."""

    seconds: float
    aggregate: float
    per_writer: float
    """The share of the rank that writes the most."""


class Restore(Record):
    """Reading a checkpoint into all ranks."""

    readers: int
    bytes_each_for_itself: int
    bytes_shared: int
    """Replicas share their reads (`replica_reads`)."""
    seconds_each_for_itself: float | None
    seconds_shared: float | None


class LocalTier(Record):
    """A local tier on the disk of each node, with copies on other nodes."""

    stored_bytes_per_node: int
    """One checkpoint, with the copies of other nodes."""
    wire_bytes_per_node: int
    """Sent in one save, and received."""
    durable_s: float
    restore_own_s: float
    restore_peer_s: float
    """The time of a node that has none of its shards."""
    absorbed: float | None
    """The share of node failures after which no shard is lost; None without a failure rate."""


class Interval(Record):
    """How often to save, in seconds. None: no failure rate, or no interval gives progress."""

    stall_s: float
    stall_source: str
    slowdown_s: float
    cost_s: float
    """The cost of one save: both together."""
    durable_s: float | None
    durable_source: str
    mtbf_s: float | None
    mtbf_source: str
    restart_s: float
    young_s: float | None
    daly_s: float | None
    nvidia_s: float | None
    ettr_s: float | None
    """The interval with the highest ETTR, with the time until a save is durable as exposure: our extension."""
    chosen_s: float | None
    chosen_source: str
    ettr: float | None
    """Effective training time ratio at chosen_s."""
    lost_work_s: float | None
    """Expected per failure."""
    write_share: float | None
    """Share of the interval in which a save is being written. Above 1 saves pile up."""


class Requests(Record):
    """Requests at an object store. All objects of a checkpoint have one prefix."""

    puts_per_save: int
    puts_per_s: float | None
    puts_limit_per_s: int
    gets_per_restore: int
    gets_per_s: float | None
    gets_limit_per_s: int


class Plan(Record):
    """Everything that was planned; parts without their inputs are None."""

    model: Model
    terms: list[Term]
    bytes_per_parameter: float
    size: Size
    ranks: Ranks
    sync: Bandwidth | None
    """Bandwidth for the window."""
    background: Bandwidth | None
    """Bandwidth for the interval."""
    restore: Restore
    local: LocalTier | None
    interval: Interval
    global_batch: int | None
    steps: int | None
    training: TrainingTime | None
    retained: Retained | None
    requests: Requests
    termination_grace_period_s: int | None
    """terminationGracePeriodSeconds of a pod: a step, the stall, the time until durable, and 5 seconds."""


def make_plan(inputs: PlanInputs) -> Plan:
    """Plan a run. No I/O. Raises InvalidRequest for inputs that are missing, contradict each other or make no sense."""
    model, terms, layout = inputs.counted(), inputs.state(), inputs.layout()
    size = _size(model, terms, inputs)
    ranks = _ranks(model, terms, layout, size, inputs)
    interval = _interval(size, ranks, inputs)
    batch = inputs.batch(layout.dp)
    steps = inputs.num_steps(batch)
    training = kept = None
    if steps is not None and inputs.step_s is not None:
        training = training_time(
            steps,
            inputs.step_s,
            interval.chosen_s or inf,
            interval.cost_s,
            interval.mtbf_s,
            inputs.restart_s,
            interval.durable_s or 0.0,
        )
        if interval.chosen_s is not None:
            freed = _optimizer_bytes(model, terms, inputs)
            kept = retained(
                inputs.keep,
                training.num_saves,
                interval.chosen_s,
                inputs.step_s,
                size.stored_bytes,
                inputs.price,
                freed,
            )
    restore = _restore(model, terms, layout, size, inputs)
    return Plan(
        model=model,
        terms=list(terms),
        bytes_per_parameter=per_parameter(terms),
        size=size,
        ranks=ranks,
        sync=_bandwidth(size, ranks, inputs.window_s),
        background=_bandwidth(size, ranks, interval.chosen_s),
        restore=restore,
        local=_local(size, ranks, interval, inputs),
        interval=interval,
        global_batch=batch,
        steps=steps,
        training=training,
        retained=kept,
        requests=_requests(size, ranks, restore, inputs.window_s or interval.durable_s),
        termination_grace_period_s=_grace(interval, inputs.step_s),
    )


def _taking_fields(make: Callable[_P, PlanInputs]) -> Callable[_P, Plan]:
    @wraps(make, (), ())  # whose signature is shown
    def plan(*args: _P.args, **kwargs: _P.kwargs) -> Plan:
        """Plan a run's checkpoints: `ckpt.plan(parameters=70e9, dp=8, tp=8, sharding="fsdp", failures="llama3")`.

        Takes the fields of PlanInputs by keyword; seconds, bytes and bytes per second. Nothing is read or written, and
        any thread may call it. Raises InvalidRequest. docs/how-to/planning.md lists inputs, results and the sources of
        the formulas.
        """
        return make_plan(make(*args, **kwargs))

    return plan


plan = _taking_fields(PlanInputs)


def _size(model: Model, terms: tuple[Term, ...], inputs: PlanInputs) -> Size:
    casts = derivable(terms)
    kept = [term for term in terms if term.name not in casts]
    return Size(
        raw_bytes=_bytes(model, terms, False),
        compressed_bytes=_bytes(model, terms, True),
        derived_bytes=_bytes(model, kept, False),
        derived_compressed_bytes=_bytes(model, kept, True),
        stored_bytes=_bytes(model, kept if inputs.dedup_casts else terms, inputs.compress),
    )


def _bytes(model: Model, terms: Iterable[Term], compress: bool) -> int:
    return round(model.parameters * sum(one.bytes_per_parameter * one.compressed**compress for one in terms))


def _optimizer_bytes(model: Model, terms: tuple[Term, ...], inputs: PlanInputs) -> int:
    """Bytes that thinning frees: masters stay if weights are derived from them."""
    masters = inputs.dedup_casts and derivable(terms)
    gone = ("momentum", "variance", *(() if masters else ("master",)))
    return _bytes(model, (one for one in terms if one.name in gone), inputs.compress)


def _ranks(model: Model, terms: tuple[Term, ...], layout: Layout, size: Size, inputs: PlanInputs) -> Ranks:
    found = writers(model, terms, layout)
    files, largest = num_files(found), rank_bytes(found)
    per_rank = ceil(inputs.slots * largest)
    writing = min(layout.processes, files)
    return Ranks(
        layout=layout,
        world_size=layout.world_size,
        nodes=inputs.nodes or layout.nodes,
        writers=found,
        files=files,
        largest_raw_bytes=ceil(largest),
        largest_stored_bytes=ceil(largest * size.stored_bytes / size.raw_bytes),
        host_bytes_per_rank=per_rank,
        host_bytes_per_node=per_rank * writing,
    )


def _bandwidth(size: Size, ranks: Ranks, seconds: float | None) -> Bandwidth | None:
    if seconds is None:
        return None
    return Bandwidth(
        seconds=seconds, aggregate=size.stored_bytes / seconds, per_writer=ranks.largest_stored_bytes / seconds
    )


def _durable(size: Size, ranks: Ranks, inputs: PlanInputs) -> tuple[float | None, str]:
    """Time until a save is durable, and its source: stored bytes ÷ bandwidth, or the largest rank's ÷ its own."""
    if inputs.durable_s is not None:
        return inputs.durable_s, inputs.origin("durable_s")
    times = []
    if inputs.bandwidth is not None:
        times.append((size.stored_bytes / inputs.bandwidth, "stored bytes / bandwidth"))
    if inputs.rank_bandwidth is not None:
        times.append((ranks.largest_stored_bytes / inputs.rank_bandwidth, "largest rank / bandwidth per rank"))
    return max(times) if times else (None, "unknown, counted as 0: give --bandwidth, --rank-bandwidth or --durable")


def _interval(size: Size, ranks: Ranks, inputs: PlanInputs) -> Interval:
    durable, durable_source = _durable(size, ranks, inputs)
    stall, source = inputs.stall_s, inputs.origin("stall_s")
    if stall is None:
        stall, source = ranks.largest_raw_bytes / inputs.copy_bandwidth, "assumed: a copy to host memory, not hidden"
    cost, exposed, restart = stall + inputs.slowdown_s, durable or 0.0, inputs.restart_s
    mtbf_s, mtbf_source = inputs.mtbf(ranks.nodes)
    best: float | None = None
    if mtbf_s is not None:
        found = best_interval(cost, mtbf_s, restart, exposed)
        best = found if isfinite(found) and found > 0 else None
    chosen = inputs.interval_s if inputs.interval_s is not None else best
    known = mtbf_s is not None and chosen is not None
    return Interval(
        stall_s=stall,
        stall_source=source,
        slowdown_s=inputs.slowdown_s,
        cost_s=cost,
        durable_s=durable,
        durable_source=durable_source,
        mtbf_s=mtbf_s,
        mtbf_source=mtbf_source,
        restart_s=restart,
        young_s=None if mtbf_s is None else young(cost, mtbf_s),
        daly_s=None if mtbf_s is None else daly(cost, mtbf_s),
        nvidia_s=None if mtbf_s is None else nvidia(cost, mtbf_s, restart),
        ettr_s=best,
        chosen_s=chosen,
        chosen_source="given" if inputs.interval_s is not None else "highest ETTR" if best is not None else "",
        ettr=ettr(chosen, cost, mtbf_s, restart, exposed) if known else None,  # type: ignore[arg-type]
        lost_work_s=chosen / 2 + exposed if chosen is not None else None,
        write_share=durable / chosen if durable is not None and chosen is not None else None,
    )


def _restore(model: Model, terms: tuple[Term, ...], layout: Layout, size: Size, inputs: PlanInputs) -> Restore:
    share = size.stored_bytes / size.raw_bytes
    alone = share * bytes_read(model, terms, layout)
    bandwidth = inputs.read_bandwidth or inputs.bandwidth
    of_rank = inputs.rank_read_bandwidth or inputs.rank_bandwidth
    readers = layout.world_size

    def seconds(count: float, of_one: float) -> float | None:
        times = [count / bandwidth] if bandwidth is not None else []
        if of_rank is not None:
            times.append(of_one / of_rank)
        return max(times, default=None)

    return Restore(
        readers=readers,
        bytes_each_for_itself=round(alone),
        bytes_shared=size.stored_bytes,
        seconds_each_for_itself=seconds(alone, alone / readers),
        seconds_shared=seconds(size.stored_bytes, size.stored_bytes / readers),
    )


def _local(size: Size, ranks: Ranks, interval: Interval, inputs: PlanInputs) -> LocalTier | None:
    """A shard is lost with its node and the next `local_replicas` ones, all before the first is in its place again:
    (r + 1) such rows of nodes have the one that failed."""
    if (copies := inputs.local_replicas) is None:
        return None
    each, disk, wire = size.stored_bytes / ranks.nodes, inputs.disk_bandwidth, inputs.network_bandwidth
    peer, absorbed = max(each / wire, each / disk), None
    if interval.mtbf_s is not None:
        others = (inputs.restart_s + peer) / (interval.mtbf_s * ranks.nodes)
        absorbed = 1 - min(1.0, (copies + 1) * others**copies)
    return LocalTier(
        stored_bytes_per_node=ceil(each * (copies + 1)), wire_bytes_per_node=ceil(each * copies),
        durable_s=max(each * (copies + 1) / disk, each * copies / wire), restore_own_s=each / disk,
        restore_peer_s=peer, absorbed=absorbed,
    )  # fmt: skip


def _requests(size: Size, ranks: Ranks, restore: Restore, seconds: float | None) -> Requests:
    """Multipart uploads of 8 MiB parts, at most 9,000 per file, with begin and end; receipts; manifest and outcome."""
    each = size.stored_bytes / max(1, ranks.files)
    parts = ceil(each / max(_PART_BYTES, each / _MOST_PARTS))
    puts = ranks.files * (parts + 2 if parts > 1 else 1) + ranks.world_size + 2
    gets = ceil(restore.bytes_shared / _PART_BYTES) + ranks.world_size + 2
    reading = restore.seconds_shared
    return Requests(
        puts_per_save=puts,
        puts_per_s=puts / seconds if seconds else None,
        puts_limit_per_s=PUTS_PER_PREFIX,
        gets_per_restore=gets,
        gets_per_s=gets / reading if reading else None,
        gets_limit_per_s=GETS_PER_PREFIX,
    )


def _grace(interval: Interval, step_s: float | None) -> int | None:
    if interval.durable_s is None:
        return None
    return ceil((step_s or 0.0) + interval.stall_s + interval.durable_s) + _SPARE_S
