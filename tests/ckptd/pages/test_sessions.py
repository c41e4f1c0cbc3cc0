from __future__ import annotations

from ckptd.pages.sessions import LIFETIME_S, Sessions


def test_logins_end_by_themselves() -> None:
    now = [1000.0]
    sessions = Sessions(lambda: now[0])
    id = sessions.begin("token")
    now[0] += LIFETIME_S - 1
    assert sessions.secret_of(id) == "token"
    now[0] += 1
    assert sessions.secret_of(id) is None
    now[0] -= 10
    assert sessions.secret_of(id) is None
    other = sessions.begin("token")
    sessions.end(other)
    assert sessions.secret_of(other) is None
