import itertools
import shlex
from pathlib import Path

import pytest
import typer

from ckptctl.cli import app
from ckptctl.manual import EXAMPLES
from ckptctl.output import MEANINGS
from tests.support.command_line import invoke


def test_version_and_help() -> None:
    assert invoke("--version").stdout.startswith("ckptctl ")
    shown = invoke("--help")
    assert shown.code == 0
    for code, meaning in MEANINGS.items():
        assert f"{code:>3}  {meaning}" in shown.stdout


@pytest.mark.parametrize("words", [[], ["policy"], ["token"]])
def test_words_that_ask_for_nothing_print_the_help(words: list[str]) -> None:
    done = invoke(*words)
    assert (done.code, done.stdout, done.stderr) == (2, "", invoke(*words, "--help").stdout)


def test_the_usage_has_brackets_around_what_is_optional() -> None:
    for words, usage in (
        (("ls",), "ckptctl ls [OPTIONS] [RUN]"),
        (("rm",), "ckptctl rm [OPTIONS] RUN@STEP..."),
        (("verify",), "ckptctl verify [OPTIONS] [RUN[@STEP]]..."),
        (("policy", "apply"), "ckptctl policy apply [OPTIONS] FILE"),
        (("cp",), "ckptctl cp [OPTIONS] [RUN[@STEP]]..."),
    ):
        assert invoke(*words, "--help").stdout.splitlines()[0] == f"Usage: {usage}"


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_explains_itself_with_examples_that_are_right(command: str) -> None:
    names = command.split()
    shown = invoke(*names, "--help")
    assert (shown.code, shown.stderr) == (0, "")
    assert f"{names[-1]} " in invoke(*names[:-1], "--help").stdout
    for example in EXAMPLES[command]:
        assert f"  {example}\n" in shown.stdout
        words = itertools.takewhile(lambda word: word not in "|>#", shlex.split(example))
        _program, *rest = words
        assert rest[: len(names)] == names
        found = typer.main.get_command(app)
        context = None
        for name in names:
            context = found.make_context(name, ["version"], parent=context)
            found = found.get_command(context, name)  # type: ignore[attr-defined]
        found.make_context(command, rest[len(names) :], parent=context)


@pytest.mark.parametrize("first", ["ls", "policy", "token"])
def test_global_options_stand_before_or_after_the_command(first: str, folder: Path) -> None:
    command = [first] if first == "ls" else [first, "ls"] if first == "token" else [first, "show"]
    options = ("--store", folder, "-o", "json", "-q")
    assert invoke(*options, *command) == invoke(*command, *options) == invoke(*options[:2], *command, *options[2:])
    joined = invoke(*command, f"--store={folder}", "-ojson", "--quiet", "--no-color")
    assert joined == invoke(*command, *options)


def test_the_option_after_the_command_wins(folder: Path) -> None:
    assert invoke("--store", "/nowhere/at/all", "-o", "id", "ls", "--store", folder, "-o", "json").json


def test_the_value_of_another_option_is_not_a_global_option(folder: Path) -> None:
    assert invoke("pin", "gpt@10", "paper", "--reason", "-q", "--store", folder).code == 0
    assert invoke("audit", "gpt", "-o", "json", "--store", folder).json[0]["reason"] == "-q"


@pytest.mark.parametrize("args", [("ls", "--nonsense"), ("nonsense",), ("prune",), ("ls", "--limit", "0"), ()])
def test_wrong_usage_is_exit_2_with_a_message(args: tuple[str, ...]) -> None:
    done = invoke(*args, "--store", "/tmp")
    assert done.code == 2
    assert done.stderr.startswith("error: ")


def test_errors_are_objects_for_programs() -> None:
    done = invoke("ls", "-o", "json", "--nonsense")
    assert (done.code, done.stdout) == (2, "")
    assert done.error["code"] == "invalid_request"
    assert "--nonsense" in done.error["message"]
