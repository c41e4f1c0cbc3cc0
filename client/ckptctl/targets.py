"""The target of a call: the daemon or store that the global options, the environment and the profiles choose.

Imported for every call of the program, so it imports little.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore.errors import InvalidRequest

if TYPE_CHECKING:
    import typer

    from ckptctl.profiles import Profile

_HTTP = ("http://", "https://")
GLOBAL_OPTIONS = ("url", "store", "token", "cacert", "profile", "output", "no_color", "quiet")


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon or store, and how it was chosen."""

    url: str
    is_daemon: bool
    token: str | None = field(default=None, repr=False)
    origin: str = field(default="", compare=False)
    """The option, variable or profile that chose it."""
    cacert: str | None = field(default=None, compare=False)
    """A file with the certificates of authorities that the daemon's certificate is checked against."""


def choose_target(
    url: str | None,
    store: str | None,
    token: str | None,
    explicit: Collection[str],
    find_profile: Callable[[], Profile | None] = lambda: None,
    cacert: str | None = None,
) -> Target:
    """The daemon at `url`, the store at `store`, or the target of the profile. Raises InvalidRequest if ambiguous.

    explicit: which of "url", "store", "token" and "profile" are on the command line. The command line overrides the
    environment, which overrides the configuration file.
    """
    on_line = {"url", "store"} & set(explicit)
    if on_line and "profile" in explicit:
        raise InvalidRequest("a profile and another target are set", "Choose one with --profile, --url or --store")
    if ("profile" in explicit or not (url or store)) and (profile := find_profile()) is not None:
        # A token from the environment may be for another daemon.
        token = token if "token" in explicit or profile.token is None else profile.token
        url, store, cacert = profile.url, profile.store, cacert or profile.cacert
        origin = f"profile {profile.name}"
    else:
        if url and store and len(on_line) == 1:
            url, store = (url, None) if "url" in explicit else (None, store)
        name, variable = ("url", "CKPTD_URL") if url else ("store", "CKPT_STORE")
        origin = f"--{name}" if name in explicit else variable
    if url and store:
        raise InvalidRequest(
            "both a daemon (--url, CKPTD_URL) and a store (--store, CKPT_STORE) are set",
            "Choose one with --url or --store on the command line",
        )
    if url:
        if not url.startswith(_HTTP):
            raise InvalidRequest(f"{origin} {url} is not the URL of a daemon", "Use http://..., or --store for a store")
        return Target(url, is_daemon=True, token=token, origin=origin, cacert=cacert)
    if store:
        if store.startswith(_HTTP):
            raise InvalidRequest(f"{origin} {store} is not the URL of a store", "Use --url for a daemon")
        return Target(store, is_daemon=False, origin=origin)
    raise InvalidRequest(
        "neither a daemon nor a store is set",
        "Pass --url http://HOST:PORT or --store URL, set CKPTD_URL or CKPT_STORE, or use a profile",
    )


class GlobalOptions(NamedTuple):
    """Values of the global options by name, and which of them are on the command line."""

    values: Mapping[str, Any]
    explicit: Collection[str]

    def target(self) -> Target:
        """The target that they select. Raises InvalidRequest."""
        url, store, token, profile = (self.values.get(name) for name in ("url", "store", "token", "profile"))
        return choose_target(url, store, token, self.explicit, lambda: _find_profile(profile), self.values["cacert"])


def global_options(ctx: typer.Context) -> GlobalOptions:
    """The options before and after the command; those after it win."""
    program = ctx.find_root()
    values = {name: program.params.get(name) for name in GLOBAL_OPTIONS}
    explicit: set[str] = set()
    for context in (program, ctx):
        # Depending on Typer's version, the enum of sources is in click or in Typer.
        here = {n for n in GLOBAL_OPTIONS if getattr(context.get_parameter_source(n), "name", "") == "COMMANDLINE"}
        values |= {name: context.params[name] for name in here}
        explicit |= here
    return GlobalOptions(values, explicit)


def _find_profile(name: str | None) -> Profile | None:
    from ckptctl.profiles import load_profiles

    return load_profiles().find(name)
