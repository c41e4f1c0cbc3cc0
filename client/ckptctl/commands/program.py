"""config: the profiles, and the target in force."""

from __future__ import annotations

from ckptctl.profiles import load_profiles
from ckptctl.render import Facts, Row, Table
from ckptctl.session import Session
from ckptstore.errors import InvalidRequest
from ckptstore.values import Value


class ProfileBody(Value):
    """One profile as JSON, without its token."""

    name: str
    target: str
    has_token: bool


class ConfigBody(Value):
    """The configuration as JSON."""

    file: str
    default: str | None
    profiles: list[ProfileBody]
    target: str | None
    origin: str
    has_token: bool


def show_config(session: Session) -> None:
    """Show the profiles of the configuration file, and the target in force.

    A target on the command line (--url, --store, --profile) overrides one in the environment (CKPTD_URL, CKPT_STORE,
    CKPTCTL_PROFILE), which overrides the file's own `profile`.
    """
    found = load_profiles()
    profiles = [ProfileBody(p.name, p.url or p.store or "", p.token is not None) for p in found.profiles]
    try:
        target = session.target
        body = ConfigBody(str(found.path), found.default, profiles, target.url, target.origin, target.token is not None)
    except InvalidRequest as error:
        body = ConfigBody(str(found.path), found.default, profiles, None, str(error), False)
    pairs = [
        ("file", body.file if found.path.exists() else f"{body.file} (not found)"),
        ("target", body.target or "none"),
        ("because of", body.origin),
        ("token", "yes" if body.has_token else "none"),
    ]
    columns = ("PROFILE", "TARGET", "TOKEN")
    rows = [Row((p.name, p.target, "yes" if p.has_token else "none")) for p in profiles]
    session.screen.emit(body, [p.name for p in profiles], [Facts(pairs), Table(columns, rows)])
