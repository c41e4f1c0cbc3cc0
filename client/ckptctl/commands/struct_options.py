"""Parameters of commands, as Typer needs them: options from the described fields of structs, and the session."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import typer

from ckptctl.session import Session
from ckptstore import human

_METAVARS = {"s": "TIME", "bytes": "SIZE", "count": "N"}


class _Input(NamedTuple):
    """A field of a struct that is an option."""

    owner: str
    """The parameter of the command that gets its value."""
    name: str
    kind: Any
    help: str
    extra: dict[str, str]
    """Additions of `about`. unit: of the text that is converted; empty otherwise."""
    default: Any

    def convert(self, value: Any) -> Any:
        """The value of the field for a value of the option."""
        if unit := self.extra["unit"]:
            number = human.quantity(value, unit)
            return int(number) if self.kind is int else number
        return tuple(value) if isinstance(value, list) else value

    def parameter(self) -> inspect.Parameter:
        """The option as a parameter of the command."""
        extra, value, text = self.extra, self._type(), self.help
        flag = extra.get("option") or f"--{self.name.removesuffix('_s').replace('_', '-')}"
        declared = f"{flag}/--no-{flag[2:]}" if self.kind is bool and self.default else flag
        metavar = extra.get("metavar") or _METAVARS.get(extra["unit"], {int: "N", float: "X", str: "NAME"}.get(value))
        shown = extra.get("default", self.default)
        if shown and not isinstance(shown, bool):
            text = f"{text}  [default: {shown}]"
        option = typer.Option(declared, metavar=metavar, help=text)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[value | None, option],
        )

    def _type(self) -> Any:
        """The type of the option: the first of the field that is not None, or str where a name is allowed."""
        if self.extra["unit"]:
            return str
        if get_origin(self.kind) is tuple:
            return list[str]
        kinds = get_args(self.kind) or (self.kind,)
        return str if str in kinds else next(one for one in kinds if one is not type(None))


def with_options(**structs: type[msgspec.Struct]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands: the described fields of structs are options in place of parameters of these names.

    Such a parameter gets a dict of the options that are on the command line, by field, converted.
    """
    inputs = {one.name: one for owner, struct in structs.items() for one in _inputs(owner, struct)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapper(session: Session, **given: Any) -> None:
            chosen: dict[str, dict[str, Any]] = {owner: {} for owner in structs}
            for name, one in inputs.items():
                value = given.pop(name)
                if value is not None and value != []:
                    chosen[one.owner][name] = one.convert(value)
            command(session, **given, **chosen)

        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            options = [one.parameter() for one in inputs.values() if one.owner == own.name]
            parameters += options or [own]
        return shown_as(wrapper, command, parameters)

    return decorate


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer, which passes a context: a first parameter of type Session gets the context's session."""
    first, *others = inspect.signature(command, eval_str=True).parameters.values()
    if first.annotation is not Session:
        return command

    def wrapper(ctx: typer.Context, **given: Any) -> None:
        command(ctx.obj, **given)

    return shown_as(wrapper, command, [first.replace(name="ctx", annotation=typer.Context), *others])


def shown_as(
    wrapper: Callable[..., None], command: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """The wrapper with these parameters, in place of the command."""
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    wrapper.__module__, wrapper.__qualname__ = command.__module__, command.__qualname__  # by which it is pickled
    return wrapper


def _inputs(owner: str, struct: type[msgspec.Struct]) -> Iterator[_Input]:
    """The fields that are described: single values."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    for name, hint in get_type_hints(struct, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, about = get_args(hint)
            yield _Input(owner, name, kind, about.description, about.extra, defaults[name])
