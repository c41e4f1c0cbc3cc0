"""The options of `plan`: one for each input that is a single value, with the input's own description."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from math import inf, isfinite
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from ckptplan.inputs import PlanInputs
from ckptstore.errors import InvalidRequest

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_BYTES = {
    f"{prefix}{unit}": float(base ** (power + 1))
    for base, unit in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGTP")
}
_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_EXAMPLES = {"s": "0.2s, 30m, 3h or 7d", "bytes": "500MB, 2.5GB or 100GiB", "count": "70e9 or 70B"}
_UNITS = {"s": _SECONDS, "bytes": _BYTES, "count": {"": 1.0, **_COUNTS}}
_METAVARS = {"s": "TIME", "bytes": "SIZE", "count": "N"}
_NUMBER = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)(?P<unit>[A-Za-z]*)")
_COUNTED = ("parameters", "expert_parameters")


def quantity(text: str, unit: str) -> float:
    """A decimal number with a unit. unit: s (durations, in seconds), bytes or count. Raises InvalidRequest."""
    match = _NUMBER.fullmatch(text)
    value = float(match["number"]) * _UNITS[unit].get(match["unit"], inf) if match is not None else inf
    if not isfinite(value):
        raise InvalidRequest(f"{text!r} cannot be read", f"Write it like {_EXAMPLES[unit]}")
    return value


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which takes `**options`, with an option for each input in their place.

    Only options that are on the command line arrive, by the names of the inputs, converted.
    """

    def wrapper(ctx: typer.Context, **given: Any) -> None:
        options = {name: _convert(name, value) for name, value in given.items() if name in _units() and _is(value)}
        others = {name: value for name, value in given.items() if name not in _units()}
        command(ctx, **others, **options)

    own = inspect.signature(command, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    wrapper.__signature__ = inspect.Signature([*parameters, *_parameters()])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in (*parameters, *_parameters())}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def _is(value: object) -> bool:
    return value is not None


def _convert(name: str, value: Any) -> Any:
    return quantity(value, _units()[name]) if _units()[name] else value


def _units() -> Mapping[str, str]:
    """The unit of each input that has an option."""
    return {name: _unit(name, meta) for name, _, meta in _inputs()}


def _unit(name: str, meta: msgspec.Meta) -> str:
    return "count" if name in _COUNTED else str((meta.extra or {})["unit"])


def _inputs() -> Iterator[tuple[str, Any, msgspec.Meta]]:
    """Name, type and description of each input that is a single value."""
    for name, hint in get_type_hints(PlanInputs, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, meta = get_args(hint)
            yield name, kind, meta


def _parameters() -> Iterator[inspect.Parameter]:
    for name, kind, meta in _inputs():
        unit = _unit(name, meta)
        value = str if unit else _plain(kind)
        flag = f"--{name.removesuffix('_s').replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if name == "compress" else flag
        metavar = _METAVARS.get(unit, {int: "N", float: "X", str: "NAME"}.get(value))
        option = typer.Option(declared, metavar=metavar, help=_help(name, meta), show_default=False)
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[value | None, option]
        )


def _plain(kind: Any) -> Any:
    """The type of an option: the first that is not None, or str where a name is allowed."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return str if str in kinds else next(one for one in kinds if one is not type(None))


def _help(name: str, meta: msgspec.Meta) -> str:
    default = next(f.default for f in msgspec.structs.fields(PlanInputs) if f.name == name)
    text = meta.description or ""
    if default is None or isinstance(default, bool) or default == 0:
        return text
    return f"{text}  [default: {'10GB' if name == 'copy_bandwidth' else default}]"
