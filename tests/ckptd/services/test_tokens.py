from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptapi.bodies import RotateRequest, Scope, TokenRequest
from ckptd.index import Database, TokenIndex
from ckptd.services.tokens import BOOTSTRAP, Caller, Tokens
from ckptstore.errors import CkptError, Conflict, Forbidden, InvalidName, InvalidRequest, NotFound, Unauthorized
from ckptstore.stores import Store
from tests.support import forking
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import invoke, run
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import FakeClock

_SETTINGS_TOKEN = "a token from the settings"


@dataclass(frozen=True, slots=True)
class Desk:
    """The service on a database of its own, with a clock that tests move."""

    tokens: Tokens
    index: TokenIndex
    clock: FakeClock
    file: Path

    def make(self, name: str = "t", scopes: tuple[Scope, ...] = (Scope.READ,), **options: object) -> str:
        asked = TokenRequest(name=name, scopes=list(scopes), **options)  # type: ignore[arg-type]
        return self.tokens.create(asked, "test").secret


@pytest.fixture
def desk(database: Database, tmp_path: Path) -> Desk:
    index, clock = TokenIndex(database), FakeClock()
    return Desk(Tokens(index, _SETTINGS_TOKEN, clock), index, clock, tmp_path / "index.db")


def test_a_secret_is_recognized_and_kept_nowhere(desk: Desk) -> None:
    secret = desk.make("trainer", (Scope.WRITE, Scope.READ), runs=["gpt-*"])
    assert desk.tokens.recognize(secret) == Caller("trainer", frozenset({Scope.READ, Scope.WRITE}), ("gpt-*",))
    assert len(secret) > 64
    stored = b"".join(path.read_bytes() for path in desk.file.parent.iterdir())
    assert b"trainer" in stored
    assert secret.encode() not in stored
    assert secret.rpartition("_")[2].encode() not in stored
    assert secret not in repr(desk.tokens.list())


def test_nothing_but_the_secret_is_recognized(desk: Desk) -> None:
    secret, other = desk.make(), desk.make("other")
    digest = desk.index.all()[1].digest
    wrong = ["", "t", secret[:-1], secret + "0", secret.upper(), secret[:-1] + ("0" if secret[-1] != "0" else "1")]
    wrong += [f"ckptd_t_{other.rpartition('_')[2]}", digest, f"ckptd_t_{digest}", "ckptd_nobody_" + "0" * 64]
    assert [given for given in wrong if desk.tokens.recognize(given)] == []
    assert desk.tokens.recognize(_SETTINGS_TOKEN) == Caller(BOOTSTRAP, frozenset({Scope.ADMIN}))


def test_it_expires(desk: Desk) -> None:
    secret = desk.make(expires_in_s=60.0)
    desk.clock.now += 59
    assert desk.tokens.recognize(secret)
    desk.clock.now += 1
    assert desk.tokens.recognize(secret) is None


def test_it_rotates_with_and_without_a_time_for_the_old_secret(desk: Desk) -> None:
    first = desk.make(runs=["gpt"])
    second = desk.tokens.rotate("t", RotateRequest(keep_old_s=60)).secret
    assert (
        desk.tokens.recognize(first) == desk.tokens.recognize(second) == Caller("t", frozenset({Scope.READ}), ("gpt",))
    )
    desk.clock.now += 60
    assert desk.tokens.recognize(first) is None
    third = desk.tokens.rotate("t", RotateRequest()).secret
    assert [bool(desk.tokens.recognize(secret)) for secret in (first, second, third)] == [False, False, True]


def test_it_is_revoked_at_once_and_its_name_is_free_again(desk: Desk) -> None:
    secret = desk.make()
    with pytest.raises(Conflict):
        desk.make()
    desk.tokens.revoke("t")
    assert desk.tokens.recognize(secret) is None
    for gone in (lambda: desk.tokens.revoke("t"), lambda: desk.tokens.rotate("t", RotateRequest())):
        with pytest.raises(NotFound):
            gone()
    assert desk.tokens.recognize(desk.make())


def test_when_it_was_last_used_is_noted(desk: Desk) -> None:
    secret = desk.make()
    assert desk.tokens.list()[0].used_at is None
    desk.clock.now += 5
    assert desk.tokens.recognize(secret)
    desk.tokens.note_use()
    assert desk.tokens.list()[0].used_at == desk.clock.now
    desk.index.note_use({"t": desk.clock.now - 3})  # another daemon's, and older
    assert desk.tokens.list()[0].used_at == desk.clock.now


def test_one_of_many_gets_the_name(desk: Desk) -> None:
    def make(_: int) -> str:
        try:
            return desk.make()
        except Conflict:
            return ""

    with ThreadPoolExecutor(8) as pool:
        made = [secret for secret in pool.map(make, range(8)) if secret]
    assert len(made) == 1
    assert desk.tokens.recognize(made[0])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"name": ""}, InvalidName), ({"name": "A"}, InvalidName), ({"name": "a_b"}, InvalidName),
        ({"name": "a" * 65}, InvalidName), ({"name": BOOTSTRAP}, InvalidName), ({"scopes": ()}, InvalidRequest),
        ({"scopes": (Scope.ADMIN,), "runs": ["gpt"]}, InvalidRequest), ({"runs": ["../x"]}, InvalidRequest),
        ({"runs": ["[a-z]"]}, InvalidRequest), ({"runs": [""]}, InvalidRequest),
        ({"runs": ["x"] * 101}, InvalidRequest), ({"expires_in_s": 0.0}, InvalidRequest),
        ({"expires_in_s": float("nan")}, InvalidRequest), ({"expires_in_s": 1e10}, InvalidRequest),
    ],
)  # fmt: skip
def test_tokens_that_make_no_sense_are_refused(desk: Desk, options: dict[str, object], error: type[CkptError]) -> None:
    with pytest.raises(error):
        desk.make(**options)  # type: ignore[arg-type]
    assert desk.tokens.list() == []


@pytest.mark.parametrize(
    ("globs", "asked", "allowed"),
    [
        (("gpt-*",), "gpt-1", True), (("gpt-*",), "gpt", False), (("gpt-*",), "GPT-1", False),
        (("gpt-?",), "gpt-1", True), (("gpt-?",), "gpt-10", False), (("gpt-?",), "gpt-*", False),
        (("gpt-*",), "gpt-*", True), (("gpt-*",), "*", False), (("gpt-*",), None, False), (("g*",), "gpt-*", False),
        (("a", "b"), "b", True), ((), None, True), ((), "x*", True),
    ],
)  # fmt: skip
def test_what_a_caller_is_for(globs: tuple[str, ...], asked: str | None, allowed: bool) -> None:
    caller = Caller("c", frozenset({Scope.READ}), globs)
    if allowed:
        caller.check_run(asked)
    else:
        with pytest.raises(Forbidden):
            caller.check_run(asked)


def test_from_the_first_admin_to_the_end_of_a_trainers_token(store: Store, tmp_path: Path) -> None:
    index = f"sqlite:///{tmp_path / 'index.db'}"
    write_checkpoint(store, "gpt-a", step=1)
    with running_daemon(store.url, index, options=("--auth", "on")) as daemon:
        assert "no token" in daemon.log()
        admin = _made_offline(store, index)
        # Not often: who guesses wrong ten times a minute is refused for one.
        deadline = time.monotonic() + 9
        while not _may(daemon, admin) and time.monotonic() < deadline:
            time.sleep(1)
        as_admin = {"CKPTD_URL": daemon.url, "CKPT_TOKEN": admin}
        made = run("token", "create", "trainer", "--scope", "read", "--run", "gpt-*", "--expires", "1d", env=as_admin)
        secret = made.stdout.strip()
        as_trainer = {"CKPTD_URL": daemon.url, "CKPT_TOKEN": secret}
        assert invoke("latest", "gpt-a", "-o", "id", env=as_trainer).stdout.startswith("gpt-a@1")
        refused = invoke("token", "ls", "-o", "json", env=as_trainer)
        assert (refused.code, refused.error["code"]) == (8, "forbidden")
        listed = invoke("token", "ls", env=as_admin).stdout
        assert "trainer" in listed
        assert "gpt-*" in listed
        assert secret not in listed
        again = invoke("token", "rotate", "trainer", "--keep-old", "1h", "-o", "json", env=as_admin).json["secret"]
        assert _may(daemon, secret, "gpt-a")
        assert _may(daemon, again, "gpt-a")
        assert invoke("token", "revoke", "trainer", env=as_admin).code == 0
        assert not _may(daemon, secret, "gpt-a")
        assert not _may(daemon, again, "gpt-a")
        log = daemon.log()
    for word in (admin, secret, again):
        assert word not in log
        assert word.rpartition("_")[2] not in log
    assert "token 'trainer' was created by 'boss'" in log


def _made_offline(store: Store, index: str) -> str:
    command = ["token", "create", "boss", "--scope", "admin", "--store", store.url, "--db", index]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    code, secret, errors = forking.run(forking.DAEMON, "ckptd", command, environment=clean)
    assert code == 0, errors
    return secret.strip()


def _may(daemon: Daemon, secret: str, run: str | None = None) -> bool:
    with daemon.client(secret) as client:
        try:
            client.latest(run)
        except Unauthorized:
            return False
    return True
