from __future__ import annotations

import os
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trustme

from ckptapi.client import DaemonClient
from ckptstore.errors import DaemonUnavailable
from tests.support.command_line import PROGRAM, clean_environment, invoke, run
from tests.support.daemons import Daemon, running_daemon

SECRET = "secret of the test"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def guarded(folder: Path) -> Iterator[Daemon]:
    with running_daemon(folder.as_uri(), environment={**os.environ, "CKPTD_TOKEN": SECRET}) as running:
        yield running


def test_a_token_is_checked_stored_privately_and_used(guarded: Daemon, home: Path) -> None:
    assert invoke("login", guarded.url, "--token", "wrong").code == 8
    assert not [*home.iterdir()]
    asked = subprocess.run(
        [*PROGRAM, "login", guarded.url], env=clean_environment(), input=f"{SECRET}\n", capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    for file in (home / "ckptctl.toml", home / "ckptctl-default.token"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert invoke("runs", "-o", "id").stdout == "gpt\nwide\n"
    assert SECRET not in invoke("config", "-o", "json").stdout + (home / "ckptctl.toml").read_text()


def test_a_second_profile_leaves_the_first_alone(guarded: Daemon, home: Path, folder: Path) -> None:
    (home / "ckptctl.toml").write_text(f'# mine\n[profiles.disk]\nstore = "{folder}"\n')
    assert invoke("login", guarded.url, "--name", "lab", "--token", SECRET).code == 0
    text = (home / "ckptctl.toml").read_text()
    assert text.startswith("# mine\n[profiles.disk]")
    assert invoke("ls", "--profile", "lab", "-o", "id").stdout == invoke("ls", "--profile", "disk", "-o", "id").stdout
    assert invoke("login", guarded.url, "--name", "lab", "--token", SECRET).code == 0
    assert (home / "ckptctl.toml").read_text() == text
    other = invoke("login", guarded.url, "--name", "disk", "--token", SECRET)
    assert (other.code, "is for" in other.stderr) == (2, True)
    for args in (("--name", "a.b"), ("--token", "")):
        assert invoke("login", guarded.url, *args, "--token", SECRET if args[0] == "--name" else "").code == 2


def test_the_authority_of_a_profile_stays(guarded: Daemon, home: Path, authority: trustme.CA) -> None:
    login = ("login", guarded.url, "--name", "lab", "--token", SECRET)
    for name in ("old.pem", "new.pem"):
        authority.cert_pem.write_to_path(str(home / name))
    assert invoke(*login, "--cacert", home / "old.pem").code == 0
    text = (home / "ckptctl.toml").read_text()
    assert tomllib.loads(text)["profiles"]["lab"]["cacert"] == str(home / "old.pem")
    assert invoke(*login).code == invoke(*login, "--cacert", home / "old.pem").code == 0
    done = invoke(*login, "--cacert", home / "new.pem")
    assert (done.code, f'Set cacert = "{home}/new.pem" there' in done.stderr) == (2, True), done.stderr
    assert (home / "ckptctl.toml").read_text() == text


def test_a_new_token_goes_where_the_profile_reads_it(guarded: Daemon, home: Path) -> None:
    file, secret = home / "ckptctl.toml", home / "secrets" / "lab"
    file.write_text(f'profile = "lab"\n[profiles.lab]\nurl = "{guarded.url}/"\ntoken_file = "{secret}"\n')
    before = file.read_text()
    assert invoke("login", guarded.url, "--name", "lab", "--token", SECRET).code == 0
    assert (stat.S_IMODE(secret.stat().st_mode), file.read_text()) == (0o600, before)
    assert invoke("runs", "-o", "id").stdout == "gpt\nwide\n"
    file.write_text(before.replace(f'token_file = "{secret}"', 'token = "old"'))
    file.chmod(0o600)
    done = invoke("login", guarded.url, "--name", "lab", "--token", SECRET)
    assert (done.code, "token_file" in done.stderr) == (2, True), done.stderr


def test_a_page_is_opened_in_the_browser(folder: Path, tmp_path: Path) -> None:
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {seen}\n')
    browser.chmod(0o755)
    with running_daemon(folder.as_uri()) as daemon:
        for which, path in ((), "/"), (("gpt",), "/runs/gpt"), (("wide@5",), "/checkpoints/wide@5."):
            done = run("open", *which, "--url", daemon.url, "-o", "id", env={"BROWSER": f"{browser} %s"})
            assert (done.code, done.stdout.startswith(daemon.url + path)) == (0, True), done.stderr
            page = done.stdout.strip()
            assert seen.read_text().splitlines()[-1] == page
            assert daemon.get(page.removeprefix(daemon.url)).status_code == 200
        before = seen.read_text()
        assert run("open", "gpt", "--no-browser", "--url", daemon.url, env={"BROWSER": f"{browser} %s"}).code == 0
        assert seen.read_text() == before


def test_a_wait_is_0_or_7(folder: Path, guarded: Daemon) -> None:
    assert invoke("doctor", "--wait", "0s", "--url", guarded.url).code == 0, "it needs no token"
    assert invoke("doctor", "--wait", "0s", "--store", folder).code == 0
    assert invoke("doctor", "--wait", "0s", "--store", folder / "gone").code == 7
    away = invoke("doctor", "--wait", "0s", "--url", "http://127.0.0.1:1", "-o", "json")
    assert away.error["code"] == "daemon_unavailable"


def test_certificates_of_ones_own_authority(
    folder: Path, tmp_path: Path, authority: trustme.CA, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = authority.issue_cert("127.0.0.1")
    files = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    certificate.cert_chain_pems[0].write_to_path(files[0])
    certificate.private_key_pem.write_to_path(files[1])
    authority.cert_pem.write_to_path(files[2])
    tls = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    with running_daemon(folder.as_uri(), options=tls, ready=False) as daemon:
        assert daemon.url.startswith("https://")
        assert invoke("doctor", "--wait", "60s", "--url", daemon.url, "--cacert", files[2]).code == 0
        unknown = invoke("ls", "--url", daemon.url)
        assert (unknown.code, "--cacert" in unknown.stderr) == (7, True), unknown.stderr
        assert invoke("ls", "--url", daemon.url, "--cacert", files[2]).code == 0
        assert invoke("ls", "--url", daemon.url, env={"CKPTD_CA": str(files[2])}).code == 0
        with (
            closing(DaemonClient(daemon.url, patience_s=600.0)) as client,
            pytest.raises(DaemonUnavailable, match="CKPTD_CA"),
        ):
            client.runs()  # at once: a retry changes nothing
        monkeypatch.setenv("CKPTD_CA", str(files[2]))
        with closing(DaemonClient(daemon.url)) as client:
            assert client.runs() == ["gpt", "wide"]
        monkeypatch.delenv("CKPTD_CA")
        plain = invoke("ls", "--url", daemon.url.replace("https", "http"))
        assert (plain.code, "try https://" in plain.stderr) == (7, True), plain.stderr
        none = invoke("ls", "--url", daemon.url, "--cacert", tmp_path / "none.pem")
        assert (none.code, "none.pem" in none.stderr) == (2, True)
        assert invoke("login", daemon.url, "--cacert", files[2], "--token", "any").code == 0
        assert invoke("runs", "-o", "id").stdout == "gpt\nwide\n", "the profile has the authority"
    with running_daemon(folder.as_uri()) as daemon:
        secure = invoke("ls", "--url", daemon.url.replace("http", "https"))
        assert (secure.code, "try http://" in secure.stderr) == (7, True), secure.stderr
