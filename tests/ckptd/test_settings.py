from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.redaction import MASK, Redactor, mask_passwords, secrets_of
from ckptd.settings import KNOBS, Settings, default_cache, default_db, load
from ckptstore.errors import InvalidRequest
from docsite.reference import settings
from tests.support.forking import DAEMON, run

_STORE = {"store": "s3://bucket"}
_PAGE = settings()


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_text('store = "s3://file"\nport = 1\nhost = "127.0.0.3"\nstore_reads = 3\npoll_seconds = 7\n')
    environment = {"CKPTD_CONFIG": str(file), "CKPTD_PORT": "2", "CKPTD_HOST": "127.0.0.2", "CKPTD_LOG_LEVEL": " "}
    found = load({"port": "3"}, environment)
    assert (found.settings.port, found.origins["port"]) == (3, "flag --port")
    assert (found.settings.host, found.origins["host"]) == ("127.0.0.2", "environment CKPTD_HOST")
    assert (found.settings.store_reads, found.origins["store_reads"]) == (3, f"file {file}")
    assert (found.settings.poll_seconds, found.settings.log_level) == (7.0, "info")
    assert found.origins["log_level"] == "default"
    assert (found.settings.db, found.settings.cache) == (default_db("s3://file"), default_cache("s3://file"))
    other = tmp_path / "other.toml"
    other.write_text('store = "s3://other"\n')
    assert load({"config": str(other)}, environment).settings.store == "s3://other"


@pytest.mark.parametrize("knob", [knob for knob in KNOBS if knob.name != "store"], ids=lambda knob: knob.name)
def test_every_setting_can_be_set_everywhere_and_is_explained(knob: object, tmp_path: Path) -> None:
    name, default, secret = knob.name, knob.default, knob.metadata["secret"]  # type: ignore[attr-defined]
    text = {"auth": "on", "log_level": "debug", "log_format": "json", "host": "::1"}.get(
        name, "17" * 8 if secret else "17"
    )
    also = {"tls_cert": {"tls_key": "k"}, "tls_key": {"tls_cert": "c"}}.get(name, {})
    expected, file = type(default)(text), tmp_path / "ckptd.toml"
    quoted = f'"{text}"' if isinstance(expected, str) else text
    file.write_text(f"{name} = {quoted}\n")
    flags = {**_STORE, **also}
    assert getattr(load({**flags, "config": str(file)}, {}).settings, name) == expected
    assert getattr(load(flags, {f"CKPTD_{name.upper()}": text}).settings, name) == expected
    if not secret:
        assert getattr(load({**flags, name: text}, {}).settings, name) == expected
        assert f"`--{name.replace('_', '-')}`" in _PAGE
    assert f"`CKPTD_{name.upper()}`" in _PAGE


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 'x'", "sets port to a str"), ("port = 1.5", "sets port to a float"),
        ("port = true", "sets port to a bool"), ("colour = 1", "sets 'colour', which is not a setting"),
        ("port = ", "cannot read"), ("\xff", "cannot read"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_name(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "ckptd.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=says) as caught:
        load({**_STORE, "config": str(file)}, {})
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        ({"port": "x"}, {}, "flag --port is 'x'"),
        ({}, {"CKPTD_PORT": "tcp://10.0.0.1:8470"}, "environment CKPTD_PORT"),
        ({"config": "/nowhere.toml"}, {}, "/nowhere.toml"), ({"store": ""}, {}, "no store"),
        ({"auth": "maybe"}, {}, "auth is 'maybe'"), ({"auth": "off", "host": "0.0.0.0"}, {}, "with auth off"),
        ({"auth": "off", "host": "example.com"}, {}, "with auth off"),
        ({"auth": "off"}, {"CKPTD_TOKEN": "x" * 16}, "auth is off, but"),
        ({}, {"CKPTD_TOKEN": "x" * 15}, "15 characters"), ({"tls_cert": "c"}, {}, "only one"),
        ({"poll_seconds": "inf"}, {}, "poll_seconds is inf"),
        ({"drain_seconds": "nan"}, {}, "drain_seconds is nan"), ({"poll_seconds": "0"}, {}, "poll_seconds"),
        ({"port": "70000"}, {}, "port"), ({"cache_bytes": "-1"}, {}, "cache_bytes"),
        ({}, {"CKPTD_STORE_READS": "0"}, "store_reads"), ({}, {"CKPTD_LOG_LEVEL": "loud"}, "log_level"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(flags: dict[str, str], environment: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load({**_STORE, **flags}, environment)


def test_auth_may_be_off_on_loopback_only() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Settings(store="s", auth="off", host=host)


def test_the_command_shows_them_without_secrets(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")},
        "CKPTD_TOKEN": "hidden token of the test",
        "CKPTD_DB": "postgresql+psycopg://ckptd:hidden-password@db/ckptd",
    }
    command = ["config", "--store", "ftp://me:hidden-word@host/folder", "--port", "1"]
    code, printed, errors = run(DAEMON, "ckptd", command, environment=environment)
    assert code == 0, errors
    lines = {line.split()[0]: line.split()[1:] for line in printed.splitlines()}
    assert "hidden" not in printed + errors
    assert lines["token"] == [MASK, "environment", "CKPTD_TOKEN"]
    assert lines["db"][0] == f"postgresql+psycopg://ckptd:{MASK}@db/ckptd"
    assert lines["store"] == [f"ftp://me:{MASK}@host/folder", "flag", "--store"]
    assert (lines["port"], list(lines)) == (["1", "flag", "--port"], [knob.name for knob in KNOBS])
    assert not (tmp_path / "index.db").exists()


def test_secrets_are_replaced_wherever_they_stand() -> None:
    environment = {"AWS_SECRET_ACCESS_KEY": "sk/12+34.56", "PGPASSWORD": "pass", "HOME": "/home/someone"}
    redact, token = Redactor(secrets_of(environment)), "ckptd_trainer-1_" + "0af9" * 16
    text = f"GET /x?a={token} by sk/12+34.56 at postgresql://u:p4ss@h/d and http://h:80/v1/checkpoints/gpt@30, pass on"
    assert redact(text) == (
        f"GET /x?a={MASK} by {MASK} at postgresql://u:{MASK}@h/d and http://h:80/v1/checkpoints/gpt@30, pass on"
    )
    assert mask_passwords("http://127.0.0.1:8470/runs/gpt@3") == "http://127.0.0.1:8470/runs/gpt@3"
