"""Bearer tokens: creation, recognition, rotation, revocation.

A secret has 256 random bits, so one SHA-256 protects it as well as a slower hash would. Recognition does not query
the database: tokens are reloaded every second, so that changes by other daemons take effect within a second, and
callers are not locked out while the database is unavailable.
"""

from __future__ import annotations

import re
import secrets
import threading
from dataclasses import asdict
from fnmatch import fnmatchcase
from hashlib import sha256
from hmac import compare_digest

from ckptapi.bodies import NewTokenBody, RotateRequest, Scope, TokenBody, TokenRequest
from ckptd.index import Token, TokenIndex
from ckptstore.clock import Clock
from ckptstore.errors import Forbidden, IndexUnavailable, InvalidName, InvalidRequest
from ckptstore.format.decoding import convert
from ckptstore.values import Value

BOOTSTRAP = "bootstrap"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_SECRET = re.compile(r"ckptd_([a-z0-9.-]{1,64})_[0-9a-f]{64}")
_GLOB = re.compile(r"[A-Za-z0-9._*?-]{1,128}")
_MAX_GLOBS = 100
_MAX_S = 10 * 365 * 24 * 3600.0
_MAX_KEEP_S = 30 * 24 * 3600.0


class Tokens:
    """The tokens in force. Any thread may call any method; only `recognize` never blocks on the database."""

    def __init__(self, index: TokenIndex, bootstrap: str, clock: Clock) -> None:
        """bootstrap: the secret of an admin token from the settings; empty if there is none."""
        self._index = index
        self._bootstrap = _digest(bootstrap) if bootstrap else ""
        self._clock = clock
        self._known: dict[str, Token] = {}
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    def recognize(self, secret: str) -> Caller | None:
        """The caller with this secret; None if it is unknown, expired or revoked."""
        digest = _digest(secret)
        if self._bootstrap and compare_digest(digest, self._bootstrap):
            return Caller(BOOTSTRAP, frozenset({Scope.ADMIN}))
        match = _SECRET.fullmatch(secret)
        token = self._known.get(match[1]) if match else None
        if token is None or not _accepts(token, digest, self._clock()):
            return None
        with self._lock:
            self._used[token.name] = self._clock()
        return Caller(token.name, token.scopes, token.runs)

    def any(self) -> bool:
        """Whether there is any token."""
        return bool(self._bootstrap or self._known)

    def refresh(self) -> None:
        """Reload the tokens. Raises IndexUnavailable; the tokens loaded before stay in force then."""
        with self._reading:  # a slow reader must not restore a token that was revoked meanwhile
            self._known = {token.name: token for token in self._index.all()}

    def note_use(self) -> None:
        """Record when each token was last used. For one background thread. Raises IndexUnavailable."""
        with self._lock:
            used, self._used = self._used, {}
        try:
            if used:
                self._index.note_use(used)
        except IndexUnavailable:
            with self._lock:
                self._used = {**used, **self._used}
            raise

    def list(self) -> list[TokenBody]:
        """All tokens, by name; `used_at` is accurate to a minute."""
        return [_body(token) for token in self._index.all()]

    def create(self, request: TokenRequest, by: str) -> NewTokenBody:
        """Create a token; durable and in force on return. Raises InvalidName, InvalidRequest or Conflict."""
        _check(request)
        secret = _new_secret(request.name)
        now = self._clock()
        token = Token(
            name=request.name,
            digest=_digest(secret),
            scopes=frozenset(request.scopes),
            runs=tuple(request.runs),
            created_at=now,
            created_by=by,
            expires_at=now + request.expires_in_s if request.expires_in_s is not None else None,
        )
        self._index.create(token)
        self.refresh()
        return NewTokenBody(token=_body(token), secret=secret)

    def rotate(self, name: str, request: RotateRequest) -> NewTokenBody:
        """Give a token a new secret; durable and in force on return. Raises InvalidRequest or NotFound."""
        if not 0 <= request.keep_old_s <= _MAX_KEEP_S:
            raise InvalidRequest(f"keep_old_s is {request.keep_old_s}", f"Use 0 to {_MAX_KEEP_S:.0f} seconds")
        secret = _new_secret(name)
        token = self._index.rotate(name, _digest(secret), self._clock() + request.keep_old_s)
        self.refresh()
        return NewTokenBody(token=_body(token), secret=secret)

    def revoke(self, name: str) -> None:
        """Revoke a token; this daemon refuses it on return, other daemons within a second. Raises NotFound."""
        self._index.delete(name)
        self.refresh()


def _accepts(token: Token, digest: str, now: float) -> bool:
    if token.expires_at is not None and now >= token.expires_at:
        return False
    if compare_digest(digest, token.digest):
        return True
    return compare_digest(digest, token.previous or "") and now < (token.previous_until or 0)


def _check(request: TokenRequest) -> None:
    if not _NAME.fullmatch(request.name) or request.name == BOOTSTRAP:
        raise InvalidName(
            f"token name {request.name[:80]!r} is not allowed",
            f"Use 1 to 64 lower-case letters, digits, '.' and '-', and not {BOOTSTRAP!r}",
        )
    if not request.scopes:
        raise InvalidRequest("a token needs at least one scope", f"Scopes are {', '.join(Scope)}")
    if Scope.ADMIN in request.scopes and request.runs:
        raise InvalidRequest(
            "an admin token cannot be bound to runs", "Admins can create tokens for all runs: use other scopes"
        )
    if len(request.runs) > _MAX_GLOBS or not all(_GLOB.fullmatch(glob) for glob in request.runs):
        raise InvalidRequest(f"runs {request.runs[:3]} are not allowed", f"Use up to {_MAX_GLOBS} names with * and ?")
    if request.expires_in_s is not None and not 0 < request.expires_in_s <= _MAX_S:
        raise InvalidRequest(
            f"expires_in_s is {request.expires_in_s}", "Use a positive number of seconds, at most ten years"
        )


def _new_secret(name: str) -> str:
    return f"ckptd_{name}_{secrets.token_hex(32)}"


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _body(token: Token) -> TokenBody:
    return convert({**asdict(token), "scopes": sorted(token.scopes)}, TokenBody)


_WILD = frozenset("*?")


class Caller(Value):
    """A token, without its secret."""

    name: str
    scopes: frozenset[Scope]
    runs: tuple[str, ...] = ()
    """Globs (* and ?) of the runs that the token is bound to; empty if it is not bound."""

    def may(self, scope: str) -> bool:
        """Whether the token has the scope or is an admin."""
        return bool({scope, Scope.ADMIN} & self.scopes)

    def sees(self, run: str) -> bool:
        """Whether the token may access a run."""
        return not self.runs or any(fnmatchcase(run, glob) for glob in self.runs)

    def check_scope(self, scope: Scope) -> None:
        """Raises Forbidden unless the token has the scope or is an admin."""
        if not self.may(scope):
            raise Forbidden(
                f"token {self.name!r} has no scope {scope.value!r}",
                "Use another token, or ask an admin for one with this scope",
            )

    def check_owner(self, owner: str) -> None:
        """Raises Forbidden unless the token of this name is the caller's, or the caller may delete checkpoints."""
        if owner != self.name and not self.may(Scope.PRUNE):
            raise Forbidden(
                f"token {self.name!r} did not begin this lease or restore: {owner or 'no token'} did",
                "Use the same token, or one with scope 'prune'",
            )

    def check_run(self, run: str | None) -> None:
        """Raises Forbidden unless the token may access a run, or all runs that match a glob. None: all runs."""
        wild = run is None or not _WILD.isdisjoint(run)
        if self.runs and (run not in self.runs if wild else not self.sees(run or "")):
            which = "all runs" if run is None else f"run {run!r}"
            raise Forbidden(
                f"token {self.name!r} may not access {which}", f"Name one of its runs: {', '.join(self.runs)}"
            )


ANONYMOUS = Caller("anonymous", frozenset({Scope.ADMIN}))
"""The caller of every request if authentication is off."""
