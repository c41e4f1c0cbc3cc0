"""plan: sizes, bandwidth, the best interval, training time and price of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from ckpt.foreign.safetensors_file import StoredTensor, read_header
from ckptctl.commands.plan_blocks import plan_blocks
from ckptctl.commands.plan_chart import draw
from ckptctl.commands.struct_options import quantity, with_options
from ckptctl.completion import checkpoint_names, run_names
from ckptctl.render import write_file
from ckptctl.session import Session, open_target
from ckptctl.targets import Target
from ckptplan.history import contents, history
from ckptplan.inputs import PlanInputs
from ckptplan.layout import Sharding
from ckptplan.model import Model, from_config
from ckptplan.plan import make_plan
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.format.decoding import convert
from ckptstore.format.documents import Manifest
from ckptstore.format.records import SAVE_COST, Policy, SaveCost
from ckptstore.names import Reference, check_run
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores.checks import StoreSpeed, measure_store

_STATE = {"optimizer", "weights", "master", "moments", "grads"}
_MEASURED = 5
"""The newest saves whose cost is read."""


RunOrCheckpoint = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN[@STEP]",
        help="Plan for the contents of this checkpoint.",
        show_default=False,
        autocompletion=checkpoint_names,
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Plan for this run: contents of its newest checkpoint, and what its saves cost so far.",
        show_default=False,
        autocompletion=run_names,
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A Hugging Face config.json.", show_default=False)
]
SafetensorsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A safetensors file, or a folder of them.", show_default=False)
]
MeasureOption = Annotated[
    str | None,
    typer.Option(
        metavar="STORE",
        help="Measure what one rank writes and reads, with real objects that are removed again.",
        show_default=False,
    ),
]
MeasureSizeOption = Annotated[str, typer.Option(metavar="SIZE", help="Bytes that --measure writes.")]
PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.svg", help="Draw the training time ratio over the interval.", show_default=False),
]


@with_options(rules=Policy, options=PlanInputs)
def plan(
    ctx: typer.Context,
    checkpoint: RunOrCheckpoint = None,
    from_run: FromOption = None,
    config: ConfigOption = None,
    safetensors: SafetensorsOption = None,
    measure: MeasureOption = None,
    measure_size: MeasureSizeOption = "256MB",
    plot: PlotOption = None,
    rules: Any = None,
    options: Any = None,
) -> None:
    """Plan a run's checkpoints before it starts: sizes, bandwidth, memory, the best interval, time and price.

    The model is given by --parameters, --model, the --layers of a transformer, a file, or a checkpoint. Everything
    else is optional; parts without their inputs are left out. docs/how-to/planning.md has the
    formulas and their sources.
    """
    session: Session = ctx.obj
    found = _model(session, checkpoint, from_run, config, safetensors)
    _check_state(found, options)
    if measure is not None:
        if measure.startswith(("http://", "https://")):
            raise InvalidRequest("--measure needs the URL of a store, not of a daemon", "Give file:///... or s3://...")
        found |= _measured(session, measure, quantity(measure_size, "bytes"))
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
        return {"model": from_config(_read(config), str(config))}
    if safetensors is not None:
        return _from_safetensors(safetensors)
    if checkpoint is not None:
        text = checkpoint if "@" in checkpoint else f"{checkpoint}@latest"
        found = session.source.find(Reference.parse(text))
        return _contents(found, read_manifest(session.source, found))
    return _from_run(session, run) if run is not None else {}


def _check_state(found: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if options describe a state that a checkpoint has."""
    described = sorted(options.keys() & _STATE) if "terms" in found else []
    if described:
        raise InvalidRequest(
            f"the bytes per parameter are those of a checkpoint, so --{described[0]} has no effect", "Leave it out"
        )


def _from_run(session: Session, run: str) -> dict[str, Any]:
    listed = session.source.checkpoints(check_run(run))
    usable = [one for one in listed if one.state is State.COMMITTED]
    if not usable:
        raise NoCheckpoint(f"run {run!r} has no checkpoint in {session.source.url}", "ckptctl runs lists the runs")
    manifests = [read_manifest(session.source, one) for one in usable[:_MEASURED]]
    found = history(listed, _costs(manifests))
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
    store = cast(StoreSource, open_target(Target(url, is_daemon=False))).store
    with session.screen.progress("measuring", 2 * int(num_bytes)) as progress:
        speed: StoreSpeed = measure_store(store, session.clock, int(num_bytes), progress)
    session.screen.note(
        f"one rank writes {human.size(int(speed.write_bytes_per_s))}/s to {speed.store} and reads "
        f"{human.size(int(speed.read_bytes_per_s))}/s, with {human.count(speed.num_objects, 'object')}"
    )
    return {"rank_bandwidth": speed.write_bytes_per_s, "rank_read_bandwidth": speed.read_bytes_per_s}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{path} cannot be read: {error.strerror}", "Check the path")
