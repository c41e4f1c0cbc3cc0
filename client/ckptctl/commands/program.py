"""config: the profiles, and the target in force."""

from __future__ import annotations

from ckptctl.profiles import load_profiles
from ckptctl.render import Facts, Row, Table
from ckptctl.session import Session
from ckptstore.errors import InvalidRequest


def show_config(session: Session) -> None:
    """Show the profiles of the configuration file, and the target in force.

    A target on the command line (--url, --store, --profile) overrides one in the environment (CKPTD_URL, CKPT_STORE,
    CKPTCTL_PROFILE), which overrides the file's own `profile`.
    """
    found = load_profiles()
    try:
        url, origin, token = session.target.url, session.target.origin, session.target.token
    except InvalidRequest as error:
        url, origin, token = None, str(error), None
    profiles = [
        {"name": p.name, "target": p.url or p.store or "", "has_token": p.token is not None} for p in found.profiles
    ]
    body = {
        "file": str(found.path),
        "default": found.default,
        "profiles": profiles,
        "target": url,
        "origin": origin,
        "has_token": token is not None,
    }
    pairs = [
        ("file", str(found.path) if found.path.exists() else f"{found.path} (not found)"),
        ("target", url or "none"),
        ("because of", origin),
        ("token", "yes" if token else "none"),
    ]
    columns = ("PROFILE", "TARGET", "TOKEN")
    rows = [Row((p.name, p.url or p.store or "", "yes" if p.token else "none")) for p in found.profiles]
    session.screen.emit(body, [p.name for p in found.profiles], [Facts(pairs), Table(columns, rows)])
