"""Logins of browsers: a random id stands for a token, for some hours, in the memory of this daemon."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass

from ckptstore.clock import Clock

LIFETIME_S = 8 * 3600
_MAX_SESSIONS = 10_000


@dataclass(frozen=True, slots=True)
class _Session:
    secret: str
    expires_at: float


class Sessions:
    """For one event loop. The token itself is kept, so that one which is revoked ends its sessions at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, secret: str) -> str:
        """The id of a new session of somebody who has shown his token."""
        id = secrets.token_urlsafe(32)
        self._sessions[id] = _Session(secret, self._clock() + LIFETIME_S)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return id

    def secret_of(self, id: str) -> str | None:
        """The token that a session stands for; None if there is no such session, or no longer."""
        session = self._sessions.get(id)
        if session is None:
            return None
        if self._clock() >= session.expires_at:
            del self._sessions[id]
            return None
        return session.secret

    def end(self, id: str) -> None:
        """Forget a session; one that is gone already is fine."""
        self._sessions.pop(id, None)
