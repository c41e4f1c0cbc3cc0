"""Settings from their sources, by precedence: flag, environment, file, default."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.redaction import MASK, mask_passwords
from ckptd.settings import KNOBS, Settings, default_cache, default_db
from ckptstore.errors import InvalidRequest

PREFIX = "CKPTD_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
_TYPES: dict[str, type[Any]] = {knob.name: type(knob.default) for knob in KNOBS}
_KINDS = {str: "a string", int: "a whole number", float: "a number"}
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force, and where each comes from."""

    settings: Settings
    origins: Mapping[str, str]

    def lines(self) -> list[tuple[str, str, str]]:
        """Name, value and origin of each, with secrets masked."""
        return [(knob.name, self._shown(knob.name, knob.metadata["secret"]), self.origins[knob.name]) for knob in KNOBS]

    def _shown(self, name: str, secret: bool) -> str:
        value = str(getattr(self.settings, name))
        return (MASK if value else "") if secret else mask_passwords(value)


def load(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> Configuration:
    """The settings of one call. flags: by name of the setting, None if not given; `config` is the file.

    Raises InvalidRequest, which names the source of an invalid value.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_TYPES, _DEFAULT)
    path = flags.get("config") or environment.get(FILE_VARIABLE)
    if path:
        for name, value in _read_file(path).items():
            values[name], origins[name] = value, f"file {path}"
    for name in _TYPES:
        variable = PREFIX + name.upper()
        flag = flags.get(name)
        if flag is not None:
            origins[name] = f"flag --{name.replace('_', '-')}"
            values[name] = _parse(name, flag, origins[name])
        elif text := environment.get(variable, "").strip():
            origins[name] = f"environment {variable}"
            values[name] = _parse(name, text, origins[name])
    if store := values.get("store"):
        values["db"] = values.get("db") or default_db(store)
        values["cache"] = values.get("cache") or default_cache(store)
    return Configuration(Settings(**values), origins)


def _read_file(path: str) -> dict[str, Any]:
    try:
        found = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"cannot read the settings in {path}: {error}", "It must be a TOML file") from error
    return {name: _checked(name, value, path) for name, value in found.items()}


def _checked(name: str, value: Any, path: str) -> Any:
    kind = _TYPES.get(name)
    if kind is None:
        raise InvalidRequest(f"{path} sets {name!r}, which is not a setting", f"The settings are: {', '.join(_TYPES)}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InvalidRequest(f"{path} sets {name} to a {type(value).__name__}", f"Use {_KINDS[kind]}")
    return value


def _parse(name: str, text: str, where: str) -> Any:
    kind = _TYPES[name]
    try:
        return kind(text)
    except ValueError as error:
        raise InvalidRequest(f"{where} is {text!r}", f"Use {_KINDS[kind]}") from error
