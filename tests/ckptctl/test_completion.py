import re
from pathlib import Path

import pytest

from tests.support.command_line import run
from tests.support.daemons import running_daemon


def offered(*words: object) -> list[str]:
    """The completions of the last word, requested as by the zsh script of --install-completion."""
    line = " ".join(["ckptctl", *map(str, words)])
    done = run(env={"_CKPTCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line})
    assert done.stderr == ""
    return re.findall('"([^"]*)"', done.stdout)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("ls", "g"), ["gpt"]),
        (("show", "gpt@3"), ["gpt@30"]),
        (("show", "w"), ["wide@latest", "wide@5"]),
        (("verify", "gpt@l"), ["gpt@latest"]),
        (("show", "typo@"), ["typo@latest"]),
    ],
)
def test_names_in_the_store_are_offered(folder: Path, words: tuple[str, ...], names: list[str]) -> None:
    assert offered("--store", folder, *words) == names


def test_names_are_offered_through_a_daemon(folder: Path) -> None:
    with running_daemon(folder.as_uri()) as daemon:
        assert offered("--url", daemon.url, "pin", "gpt@1") == ["gpt@10"]


def test_nothing_is_offered_when_the_daemon_does_not_answer(tmp_path: Path) -> None:
    assert offered("--store", tmp_path / "gone", "ls", "g") == []
    assert offered("--url", "http://127.0.0.1:1", "show", "gpt@") == []
    assert offered("show", "gpt@") == []


def test_the_script_of_a_shell_is_printed() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = run("completion", shell)
        assert (done.code, "_CKPTCTL_COMPLETE" in done.stdout, done.stderr) == (0, True, "")
    assert run("completion", "tcsh").code == 2


def test_versions_of_the_program_and_the_daemon(folder: Path) -> None:
    alone = run("version", "-o", "json")
    assert (alone.code, alone.json["daemon"]) == (0, None)
    with running_daemon(folder.as_uri()) as daemon:
        both = run("version", "--url", daemon.url, "-o", "json")
    assert both.json == {"ckptctl": alone.json["ckptctl"], "daemon": alone.json["ckptctl"]}
