from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.profiles import Profile, load_profiles
from ckptctl.targets import Target, choose_target
from ckptstore.errors import InvalidRequest
from tests.support.command_line import invoke, succeed

_LAB = Profile("lab", url="https://lab", token="secret of the lab")


def write(home: Path, text: str, mode: int = 0o600) -> None:
    (home / "ckptctl.toml").write_text(text)
    (home / "ckptctl.toml").chmod(mode)


def test_the_command_line_beats_the_environment_beats_the_file() -> None:
    def choose(url: str | None, token: str | None, *explicit: str) -> Target:
        return choose_target(url, None, token, explicit, lambda: _LAB)

    assert choose(None, None) == Target("https://lab", True, "secret of the lab")
    assert choose("http://env", "t") == Target("http://env", True, "t")
    assert choose("http://env", "t", "profile") == Target("https://lab", True, "secret of the lab")
    assert choose("http://env", "t", "profile", "token") == Target("https://lab", True, "t")
    with pytest.raises(InvalidRequest, match="a profile and another target"):
        choose("http://line", None, "url", "profile")
    # A token goes to the daemon it belongs to, and to no other.
    assert choose("http://line", None, "url").token is None


def test_commands_go_to_the_profile(home: Path, folder: Path) -> None:
    write(home, f'profile = "disk"\n[profiles.disk]\nstore = "{folder}"\n[profiles.gone]\nstore = "/nowhere/at/all"\n')
    assert invoke("latest", "gpt", "-o", "id").stdout.startswith("gpt@40")
    assert invoke("latest", "--profile", "gone").code == 7
    assert invoke("latest", env={"CKPTCTL_PROFILE": "gone"}).code == 7
    assert invoke("latest", "--profile=disk", "gpt", env={"CKPTCTL_PROFILE": "gone"}).code == 0
    missing = invoke("ls", "--profile", "nope")
    assert (missing.code, "Profiles: disk, gone" in missing.stderr) == (2, True)


def test_config_shows_what_is_in_force_without_tokens(home: Path) -> None:
    (home / "lab.token").write_text("secret of the lab\n")
    (home / "lab.token").chmod(0o600)
    write(home, f'profile = "lab"\n[profiles.lab]\nurl = "https://lab"\ntoken_file = "{home}/lab.token"\n', 0o644)
    assert load_profiles().profiles == (_LAB,)
    shown = invoke("config", "-o", "json").json
    assert (shown["target"], shown["origin"], shown["has_token"]) == ("https://lab", "profile lab", True)
    assert invoke("config", "--url", "http://x", "-o", "json").json["origin"] == "--url"
    text = invoke("config").stdout
    assert "https://lab" in text
    assert "secret" not in text + repr(load_profiles())


def test_without_a_file_config_reports_it(home: Path) -> None:
    shown = succeed("config")
    assert "not found" in shown.stdout
    assert "neither a daemon nor a store" in shown.stdout


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ('[profiles.a]\nurl = "http://h"\ntoken = "t"', 0o644, "other users can read it"),
        ('[profiles.a]\nurl = "http://h"\nstore = "s"', 0o600, "needs a url or a store"),
        ("[profiles.a]\n", 0o600, "needs a url or a store"),
        ('[profiles.a]\nurl = "http://h"\ntoken = "t"\ntoken_file = "f"', 0o600, "a token and a token_file"),
        ('[profiles.a]\nurl = "http://h"\ntoken_file = "/nowhere"', 0o600, "cannot read the token"),
        ('[profiles.a]\ncolour = "red"', 0o600, "colour"),
        ("[profiles", 0o600, "cannot use"),
        ('profile = "b"', 0o600, "no profile 'b'"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(home: Path, text: str, mode: int, says: str) -> None:
    write(home, text, mode)
    done = invoke("ls")
    assert (done.code, done.stdout) == (2, "")
    assert says in done.stderr
