"""Profiles: named targets in the user's configuration file, with tokens that stay out of the shell history.

profile = "lab"

[profiles.lab]
url = "https://ckptd.example.com"
token_file = "~/.config/ckptctl-lab.token"
cacert = "~/lab-ca.pem"

[profiles.disk]
store = "file:///mnt/checkpoints"
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import convert
from ckptstore.values import Value

_OTHERS = 0o077
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Profile:
    """One target. Exactly one of url and store is set."""

    name: str
    url: str | None = None
    store: str | None = None
    token: str | None = field(default=None, repr=False)
    cacert: str | None = None


class Profiles(NamedTuple):
    """The contents of the file; empty without a file."""

    path: Path
    default: str | None = None
    profiles: tuple[Profile, ...] = ()

    def find(self, name: str | None) -> Profile | None:
        """The profile of this name; without a name, the default one or None. Raises InvalidRequest."""
        name = name or self.default
        if name is None:
            return None
        known = {profile.name: profile for profile in self.profiles}
        if name not in known:
            names = ", ".join(known) or "none"
            raise InvalidRequest(f"there is no profile {name!r} in {self.path}", f"Profiles: {names}")
        return known[name]


class _Entry(Value, forbid_unknown_fields=True):
    url: str | None = None
    store: str | None = None
    token: str | None = None
    token_file: str | None = None
    cacert: str | None = None


class _File(Value, forbid_unknown_fields=True):
    profile: str | None = None
    profiles: dict[str, _Entry] = {}


def configuration_path() -> Path:
    """$XDG_CONFIG_HOME/ckptctl.toml, else ~/.config/ckptctl.toml."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "ckptctl.toml"


def load_profiles() -> Profiles:
    """Read the file. Raises InvalidRequest if it is invalid, or if other users could read a token in it."""
    path = configuration_path()
    parsed = _read(path)
    profiles = tuple(_profile(path, name, entry) for name, entry in parsed.profiles.items())
    return Profiles(path, parsed.profile, profiles)


def _read(path: Path) -> _File:
    try:
        parsed = convert(tomllib.loads(path.read_text()), _File)
    except FileNotFoundError:
        return _File()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"cannot use {path}: {error}", "docs/how-to/command-line.md has an example") from error
    if any(entry.token for entry in parsed.profiles.values()):
        _check_private(path)
    return parsed


def _profile(path: Path, name: str, entry: _Entry) -> Profile:
    if bool(entry.url) == bool(entry.store):
        raise InvalidRequest(f"profile {name!r} in {path} needs a url or a store", "Give exactly one of them")
    if entry.token and entry.token_file:
        raise InvalidRequest(f"profile {name!r} in {path} has a token and a token_file", "Remove one of them")
    cacert = str(Path(entry.cacert).expanduser()) if entry.cacert else None
    return Profile(name, entry.url, entry.store, entry.token or _read_token(entry.token_file), cacert)


def _read_token(name: str | None) -> str | None:
    if name is None:
        return None
    path = Path(name).expanduser()
    try:
        _check_private(path)
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the token in {path}: {error}", "Correct token_file") from error


def _check_private(path: Path) -> None:
    if path.stat().st_mode & _OTHERS:
        raise InvalidRequest(f"{path} holds a token, and other users can read it", f"chmod 600 {path}")


def save_profile(name: str, url: str, token: str, cacert: str | None = None) -> Path:
    """Store the daemon at `url` as a profile, and its token in a file that only the user can read. Returns the path.

    The first profile becomes the default. Of an existing profile only the token changes, in its token_file. Raises
    InvalidRequest if it has another target, another cacert or no token_file, or if a file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r} is not the name of a profile", "Use letters, digits, '_' and '-'")
    path = configuration_path()
    known = _read(path)
    existing = known.profiles.get(name)
    secret = _token_path(path, name, url, existing)
    authority = str(Path(cacert).expanduser().absolute()) if cacert else None
    line = f"cacert = {_quoted(authority)}\n" if authority else ""
    if existing is not None and authority not in (None, existing.cacert):
        raise InvalidRequest(f"profile {name!r} in {path} has another cacert", f"Set {line.strip()} there")
    try:
        for folder in (path.parent, secret.parent):
            folder.mkdir(parents=True, exist_ok=True)
        _write_private(secret, token + "\n")
        if existing is None:
            before = path.read_text() if path.exists() else ""
            default = "" if known.profiles or known.profile else f"profile = {_quoted(name)}\n"
            section = f"\n[profiles.{name}]\nurl = {_quoted(url)}\ntoken_file = {_quoted(str(secret))}\n{line}"
            _write_private(path, default + before + section)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error}", "Check the folder's permissions") from error
    return path


def _token_path(path: Path, name: str, url: str, existing: _Entry | None) -> Path:
    """Where the token of a profile is stored. Raises InvalidRequest if the existing profile is of another target."""
    secret = path.with_name(f"ckptctl-{name}.token")
    if existing is None:
        return secret
    if (existing.url or "").rstrip("/") != url.rstrip("/"):
        target = existing.url or existing.store
        raise InvalidRequest(f"profile {name!r} in {path} is for {target}", "Choose another --name, or edit the file")
    if not existing.token_file:
        hint = f"Give it token_file = {_quoted(str(secret))} instead of a token, or choose another --name"
        raise InvalidRequest(f"profile {name!r} in {path} has no token_file", hint)
    return Path(existing.token_file).expanduser()


def _write_private(path: Path, text: str) -> None:
    """Replace a file by one that only the user can read. An interrupted call leaves the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(aside, path)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a TOML string
