"""The program as people and scripts meet it: usage, completion, imports, exit codes, pipes, a terminal, Ctrl-C."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer

from ckptctl.cli import app
from ckptctl.manual import EXAMPLES
from ckptctl.output import MEANINGS
from ckptstore.commits.catalog import Checkpoint, latest, list_checkpoints
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.format import planning
from ckptstore.format.planning import entry_bytes, plan_reads
from ckptstore.names import RunKeys
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import ObjectReader, RangeReader, Store, open_store
from tests.conftest import S3Location
from tests.support.checkpoints import flip, whole_entries, write_checkpoint
from tests.support.command_line import PROGRAM, Finished, Terminal, clean_environment, invoke, run, run_program, succeed
from tests.support.daemons import running_daemon


def test_exit_codes_and_where_results_and_errors_go(folder: Path, filled: Store) -> None:
    newest = list_checkpoints(Run(filled, "gpt"))[0]
    done = run_program("ls", "typo", "-o", "json", "--store", folder)
    assert (done.code, done.stdout, done.error["code"]) == (4, "", "no_checkpoint")
    assert done.error["hint"]
    done = run("ls", "typo", "--store", folder)
    assert (done.code, done.stdout, "\x1b" in done.stderr) == (4, "", False)
    assert done.stderr.startswith("error: run 'typo' has no checkpoint in file://")
    done = run("verify", "*", "-o", "json", "--store", folder)
    assert (done.code, len(done.json), done.stderr) == (0, 6, "")
    flip(folder / RunKeys("gpt").shard(newest.attempt, "shard-00000.ckpt"), 0)
    assert run("verify", "*", "--store", folder).code == 5


def test_a_pipe_is_not_shortened_unless_it_has_a_width(folder: Path) -> None:
    assert "METRICS" in run("ls", "gpt", "--store", folder).stdout
    assert max(map(len, run("ls", "gpt", "--store", folder, env={"COLUMNS": "64"}).stdout.splitlines())) <= 64


def test_a_reader_that_has_seen_enough_is_no_error_message(folder: Path, filled: Store) -> None:
    many = {f"model/{i}": np.zeros((1,), dtype=np.int8) for i in range(5000)}
    write_checkpoint(filled, "many", 1, arrays=many)
    process = subprocess.Popen(
        [*PROGRAM, "show", "many@1", "--store", str(folder)],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout as out, process.stderr as err:
        out.readline()
        out.close()
        assert (err.read(), process.wait(60)) == (b"", 1)


def test_prune_asks_and_obeys(filled: Store, target: tuple[str, str]) -> None:
    """No, nothing, something else, Ctrl-D, Ctrl-C, and yes."""
    for typed, code in (("n\n", 2), ("\n", 2), ("whatever\n", 2), ("\x04", 2), ("", 130), ("y\n", 0)):
        with Terminal("prune", "--keep", "1", *target, columns=120) as terminal:
            terminal.wait_for("Delete 4 checkpoints, 9.1 MiB, freed after 24h 00m? [y/N] ")
            assert "Keep 2 checkpoints" in terminal.screen
            terminal.type(typed) if typed else terminal.interrupt()
            assert terminal.finish() == code
        assert ("nothing was deleted" in terminal.screen) == (code == 2)
        assert [c.step for c in list_checkpoints(Run(filled, "gpt"))] == ([40, 30, 30, 20, 10] if code else [40])
    assert "Hid 4 checkpoints; 9.1 MiB are freed in 24h 00m" in terminal.screen


@pytest.mark.parametrize(("keep", "code", "left"), [(1, 3, 2), (4, 6, 5)])
def test_a_late_reader_is_spared_and_reported(folder: Path, filled: Store, keep: int, code: int, left: int) -> None:
    # With four kept, only the superseded one would go.
    run = Run(filled, "gpt")
    reader_of = list_checkpoints(run)[2 if keep == 4 else -1]
    with Terminal("prune", "--keep", keep, "gpt", "--store", folder, columns=200) as terminal:
        terminal.wait_for("[y/N] ")
        lease = take_lease(run, reader_of.attempt, "restore on node7", 600)
        terminal.type("y\n")
        assert terminal.finish() == code
        assert f"1 checkpoint spared, held: {reader_of.id}" in terminal.screen
    release_lease(run, lease)
    assert len(list_checkpoints(run)) == left


def test_progress_is_for_people_who_watch(folder: Path, tmp_path: Path) -> None:
    for args in (("verify", "*"), ("export", "gpt@40", "--to", tmp_path / "x.safetensors")):
        with Terminal(*args, "--store", folder) as terminal:
            assert terminal.finish() == 0
            assert "━" in terminal.screen
    with Terminal("verify", "*", "--store", folder, "-q") as terminal:
        assert terminal.finish() == 0
        assert "━" not in terminal.screen


@pytest.mark.parametrize("kind", ["daemon", "store"])
def test_what_does_not_answer_is_named_while_one_waits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        option, url = ("--url", endpoint) if kind == "daemon" else ("--store", "s3://bucket/ckpts")
        with Terminal("ls", option, url, columns=120) as terminal:
            terminal.wait_for(f"waiting for {url} ...")
            terminal.interrupt()
            assert terminal.finish() == 130


def test_no_colour_where_none_is_wanted(folder: Path) -> None:
    with (
        Terminal("ls", "gpt", "--store", folder) as coloured,
        Terminal("ls", "gpt", "--store", folder, "--no-color") as plain,
    ):
        assert (coloured.finish(), plain.finish()) == (0, 0)
    assert "\x1b[2m" in coloured.screen
    assert "\x1b[2m\x1b[3" not in plain.screen


def test_a_store_on_s3(s3_store: S3Location, tmp_path: Path) -> None:
    store = open_store(s3_store.url, s3_store.options)
    for step in (1, 2):
        write_checkpoint(store, "gpt", step)
    to = tmp_path / "x.safetensors"
    for args, code in (
        (("ls", "gpt", "-o", "id"), 0),
        (("verify", "*"), 0),
        (("export", "gpt@2", "--to", to), 0),
        (("prune", "--keep", "1", "--yes"), 0),
        (("show", "gpt@1"), 4),
    ):
        done = run(*args, "--store", s3_store.url, env=s3_store.environment)
        assert done.code == code, done.stderr
    assert to.exists()
    assert [c.step for c in list_checkpoints(Run(store, "gpt"))] == [2]


class InterruptedSource(StoreSource):
    """Is slow, and gets Ctrl-C when all reads are queued and five have begun."""

    reads = 0

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        open_shard = super().open_shard

        def read(offset: int, buffer: memoryview) -> None:
            InterruptedSource.reads += 1
            if InterruptedSource.reads == 5:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
            with open_shard(checkpoint, shard) as opened:
                opened.read(offset, buffer)

        return RangeReader(read)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize("work", ["fetch", "verify"])
def test_ctrl_c_does_not_wait_for_all_that_is_queued(filled: Store, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "READ_BYTES", 1)  # each chunk is fetched alone
    arrays = {f"model/{i}": np.zeros((1 << 20,), dtype=np.uint8) for i in range(100)}
    write_checkpoint(filled, "long", 1, arrays=arrays)
    source, checkpoint = InterruptedSource(filled), latest(Run(filled, "long"))
    content = read_manifest(source, checkpoint).content
    buffers = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    reads = plan_reads(content, whole_entries(content.entries.name))
    InterruptedSource.reads = 0
    begin: dict[str, Callable[[], object]] = {
        "fetch": lambda: fetch(source, checkpoint, reads, buffers, threads=2),
        "verify": lambda: verify(source, checkpoint, threads=2),
    }
    gc.disable()  # an interrupt within a callback of the collector, such as hypothesis's, is dropped
    try:
        with pytest.raises(KeyboardInterrupt):
            begin[work]()
    finally:
        gc.enable()
    assert 5 <= InterruptedSource.reads < 100


def test_version_help_and_usage_with_brackets_around_what_is_optional() -> None:
    assert invoke("--version").stdout.startswith("ckptctl ")
    shown = succeed("--help")
    for code, meaning in MEANINGS.items():
        assert f"{code:>3}  {meaning}" in shown.stdout
    for words, arguments in (
        ("ls", "[RUN]"), ("rm", "RUN@STEP|RUN..."), ("verify", "[RUN[@STEP]]..."), ("policy apply", "FILE"),
        ("cp", "[RUN[@STEP]]..."),
    ):  # fmt: skip
        usage = invoke(*words.split(), "--help").stdout.splitlines()[0]
        assert usage == f"Usage: ckptctl {words} [OPTIONS] {arguments}"


@pytest.mark.parametrize("words", [[], ["policy"], ["token"]])
def test_words_that_ask_for_nothing_print_the_help(words: list[str]) -> None:
    done = invoke(*words)
    assert (done.code, done.stdout, done.stderr) == (2, "", invoke(*words, "--help").stdout)


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_explains_itself_with_examples_that_are_right(command: str) -> None:
    names = command.split()
    shown = invoke(*names, "--help")
    assert (shown.code, shown.stderr) == (0, "")
    assert f"{names[-1]} " in invoke(*names[:-1], "--help").stdout
    for example in map(str.strip, EXAMPLES[command].strip().splitlines()):
        assert f"  {example}\n" in shown.stdout
        _program, *rest = itertools.takewhile(lambda word: word not in "|>#", shlex.split(example))
        assert rest[: len(names)] == names
        found, context = typer.main.get_command(app), None
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


def test_the_option_after_the_command_wins_and_values_of_others_are_none(folder: Path) -> None:
    assert invoke("--store", "/nowhere/at/all", "-o", "id", "ls", "--store", folder, "-o", "json").json
    assert invoke("pin", "gpt@10", "paper", "--reason", "-q", "--store", folder).code == 0
    assert invoke("audit", "gpt", "-o", "json", "--store", folder).json[0]["reason"] == "-q"
    done = invoke("ls", "-o", "json", "--nonsense")
    assert (done.code, done.stdout, done.error["code"]) == (2, "", "invalid_request")
    assert "--nonsense" in done.error["message"]


def offered(*words: object) -> list[str]:
    """The completions of the last word, requested as by the zsh script of --install-completion."""
    line = " ".join(["ckptctl", *map(str, words)])
    done = run(env={"_CKPTCTL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line})
    assert done.stderr == ""
    return re.findall('"([^"]*)"', done.stdout)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("ls", "g"), ["gpt"]), (("show", "gpt@3"), ["gpt@30"]), (("show", "w"), ["wide@latest", "wide@5"]),
        (("verify", "gpt@l"), ["gpt@latest"]), (("show", "typo@"), ["typo@latest"]),
    ],
)  # fmt: skip
def test_names_in_the_store_are_offered(folder: Path, words: tuple[str, ...], names: list[str]) -> None:
    assert offered("--store", folder, *words) == names


def test_names_are_offered_through_a_daemon(folder: Path) -> None:
    with running_daemon(folder.as_uri()) as daemon:
        assert offered("--url", daemon.url, "pin", "gpt@1") == ["gpt@10"]


def test_nothing_is_offered_when_the_daemon_does_not_answer(tmp_path: Path) -> None:
    assert offered("--store", tmp_path / "gone", "ls", "g") == []
    assert (offered("--url", "http://127.0.0.1:1", "show", "gpt@"), offered("show", "gpt@")) == ([], [])


def test_the_script_of_a_shell_is_printed() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = run("completion", shell)
        assert (done.code, "_CKPTCTL_COMPLETE" in done.stdout, done.stderr) == (0, True, "")


def test_versions_of_the_program_and_the_daemon(folder: Path) -> None:
    alone = run("version", "-o", "json")
    assert (alone.code, alone.json["daemon"]) == (0, None)
    with running_daemon(folder.as_uri()) as daemon:
        both = run("version", "--url", daemon.url, "-o", "json")
    assert both.json == {"ckptctl": alone.json["ckptctl"], "daemon": alone.json["ckptctl"]}


HEAVY = ("torch", "safetensors", "httpx", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "s3fs")


def loaded_by(statement: str) -> set[str]:
    script = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], env=clean_environment(), capture_output=True, check=True)
    return {str(name) for name in json.loads(done.stdout)}


def test_version_and_help_load_nothing_heavy_and_no_command() -> None:
    ran = loaded_by(
        "import io, sys; from contextlib import redirect_stdout as to; from ckptctl.cli import app\n"
        "for option in ('--version', '--help'):\n"
        "  try:\n    with to(io.StringIO()): app([option])\n  except SystemExit: pass\n0"
    )
    assert "ckptctl.cli" in ran
    assert {name for name in ran if name.startswith("ckptctl.commands")} == set()
    more = {"numpy", "fsspec", "ckptapi", "ckptctl.session", "ckptctl.render", "ckptstore.commits", "rich", "yaml"}
    assert ran & {"msgspec", *more, *HEAVY} == set()


def test_a_command_loads_itself_only() -> None:
    loaded = loaded_by("from ckptctl.cli import _load; _load('export', 'foreign.export')")
    assert "ckptctl.commands.foreign" in loaded
    assert "ckptctl.commands.plan" not in loaded
    assert loaded & {*HEAVY, "ckpt.capture", "ckpt.checkpointer", "ckptd", "numpy.random", "rich.progress"} == set()


def test_only_a_torch_file_loads_torch() -> None:
    loaded = loaded_by(
        "from ckpt.foreign.exporting import FileFormat, writer_of; writer_of(FileFormat.SAFETENSORS, 1); "
        "assert 'torch' not in sys.modules; writer_of(FileFormat.TORCH, 1)"
    )
    assert {"torch", "ckpt.foreign.writing"} <= loaded
    assert loaded & {"ckpt.checkpointer", "ckpt.save", "ckpt.restore", "fastapi"} == set()


@dataclass(frozen=True)
class Mistake:
    """A command line, and what its error must contain. {folder}, {file} and {port} are replaced."""

    typed: str
    code: int
    cause: str
    remedy: str
    store: bool = True


MISTAKES = [
    # Words
    Mistake("list-all", 2, "there is no command 'list-all'", "ckptctl --help"),
    Mistake("restore gpt", 2, "there is no command 'restore'", "ckptctl export"),
    Mistake("download gpt", 2, "there is no command 'download'", "ckptctl export"),
    Mistake("remove gpt@10", 2, "there is no command 'remove'", "ckptctl rm"),
    Mistake("forget --keep 3", 2, "there is no command 'forget'", "ckptctl prune"),
    Mistake("check gpt@10", 2, "there is no command 'check'", "ckptctl verify"),
    Mistake("shw gpt", 2, "there is no command 'shw'", "ckptctl show"),
    Mistake("ls --run gpt", 2, "--run", "ckptctl ls RUN"),
    Mistake("ls --limt 3", 2, "--limt", "--limit"),
    Mistake("ls --limit 0", 2, "'--limit'", "greater than or equal to 1"),
    Mistake("verify gpt --ranks 0", 2, "'--ranks'", "greater than or equal to 1"),
    Mistake("completion tcsh", 2, "'tcsh'", "'zsh'"),
    Mistake("reindex", 2, "not on a store", "--url"),
    Mistake("restores", 2, "not on a store", "--url"),
    Mistake("jobs", 2, "not on a store", "--url"),
    Mistake("open gpt", 2, "not on a store", "--url"),
    # Names
    Mistake("ls gtp", 4, "run 'gtp' has no checkpoint", "ckptctl runs"),
    Mistake("ls 'exp-*'", 4, "'exp-*' has no checkpoint", "ckptctl runs"),
    Mistake("latest", 2, "several: gpt, wide", "Name the run"),
    Mistake("show gpt@11", 4, "no checkpoint at step 11", "ckptctl ls"),
    Mistake("show gpt/10", 4, "'gpt/10'", "Did you mean run 'gpt'?"),
    Mistake("show gpt@1_0", 2, "'gpt@1_0' is not a checkpoint id", "RUN@STEP"),
    Mistake("show gpt@ten", 4, "no checkpoint named 'ten'", "tags and metrics"),
    Mistake("rm gpt --yes", 2, "'gpt' names a run", "ckptctl rm gpt@STEP"),
    Mistake("verify typo", 4, "run 'typo' has no checkpoint", "ckptctl runs"),
    Mistake("verify gpt@41", 4, "no checkpoint at step 41", "ckptctl ls"),
    Mistake("prune typo --keep 1 --yes", 4, "'typo' has a checkpoint", "ckptctl runs"),
    Mistake("gc typo", 4, "run 'typo' has nothing", "ckptctl runs"),
    Mistake("du none", 4, "run 'none' has no checkpoint", "ckptctl runs"),
    Mistake("du none*", 4, "run 'none*' has no checkpoint", "ckptctl runs"),
    Mistake("goodput nope", 4, "neither a heartbeat nor a checkpoint", "first heartbeat"),
    Mistake("plan typo", 4, "run 'typo' has no checkpoint", "check the names"),
    Mistake("plan --from typo", 4, "run 'typo' has no checkpoint", "ckptctl runs"),
    Mistake("tag gpt@11 paper", 4, "no checkpoint at step 11", "ckptctl ls"),
    Mistake("pin gpt@11 paper", 4, "no checkpoint at step 11", "ckptctl ls"),
    *(
        Mistake(command, 4, "", "Did you mean run 'gpt'?")
        for command in (
            "ls gtp",
            "show gtp@10",
            "latest gtp",
            "verify gtp",
            "prune gtp --keep 1 --yes",
            "why gtp",
            "tag gtp@10 x",
        )
    ),
    Mistake("rm gpt@10 gpt@11 --yes", 4, "no checkpoint at step 11", "ckptctl ls"),
    *(Mistake(f"{verb} ../x", 2, "run name '../x' is not allowed", "letters") for verb in ("ls", "latest", "goodput")),
    Mistake("watch ../x", 2, "run name '../x' is not allowed", "letters"),
    Mistake("ls a~*", 2, "'a~*' is not a run", "wildcards"),
    Mistake("show ../x@1", 2, "'../x' is not allowed", "letters"),
    *(Mistake(f"pin gpt@10 {name}", 2, "pin name", "1 to 64 letters") for name in ("a/b", "../x", "x" * 65)),
    *(Mistake(f"pin {words}", 2, "no name", "RUN@STEP NAME") for words in ("gpt@10", "gpt --remove", "--remove")),
    # Values
    Mistake("ls gpt --metric loss=0.1", 2, "'loss=0.1' is not a metric filter", "NAME<=NUMBER"),
    Mistake("ls gpt --since yesterday", 2, "'yesterday' is not a time", "24h"),
    Mistake("ls gpt --sort loss", 2, "'loss' is not an order", "metric:NAME"),
    Mistake("prune gpt --keep 3 --grace 1 --yes", 2, "'1' is not a duration", "24h"),
    Mistake("gc --grace soon", 2, "'soon' is not a duration", "24h"),
    Mistake("tag gpt@10 --metric loss=low", 2, "'loss=low' is not a metric", "NAME=NUMBER"),
    Mistake("tag gpt@10 -m loss", 2, "'loss' is not a metric", "NAME=NUMBER"),
    Mistake("tag gpt@10 -m loss=nan", 2, "cannot be nan", "finite number"),
    Mistake("tag gpt@10 =x", 2, "cannot name a tag", "letters"),
    Mistake("tag gpt@10 a&b", 2, "cannot name a tag", "letters"),
    Mistake("tag gpt@10", 2, "nothing to set or remove", "--metric"),
    Mistake("plan", 2, "no model is given", "--parameters"),
    Mistake("plan --parameters 7X", 2, "'7X' is not a number", "70B"),
    Mistake("plan --parameters 7e9 --interval 1hour", 2, "'1hour' is not a duration", "30m"),
    Mistake("plan --parameters 7e9 --bandwidth 5", 2, "'5' is not a size", "2.5GB"),
    Mistake("plan --parameters 7e9 --sharding zero4", 2, "no sharding 'zero4'", "zero3"),
    Mistake("plan --parameters 7e9 --weights bf17", 2, "'bf17'", "bf16"),
    Mistake("plan --parameters 7e9 --config config.json", 2, "config.json cannot be read", "Check the path"),
    Mistake("plan --safetensors /dev/null/none", 2, "cannot be read", "Check the path"),
    Mistake("plan --config a --safetensors b", 2, "several models", "--config or --safetensors"),
    Mistake("plan --parameters 7e9 --measure http://host", 2, "URL of a store", "s3://"),
    Mistake("plan --parameters 7e9 --measure /nowhere/at/all", 7, "no folder", "mounted"),
    Mistake("plan gpt@20 --optimizer sgd", 2, "--optimizer has no effect", "Leave it out"),
    # Deleting
    Mistake("prune gpt --keep 1", 2, "there is no terminal to confirm at", "--yes"),
    Mistake("prune gpt", 2, "no policies are in force", "ckptctl policy"),
    Mistake("prune gpt --keep 0 --yes", 2, "keeps nothing", "the last 1"),
    Mistake("prune gpt --keep -1 --yes", 2, "cannot be -1", "from 0 on"),
    Mistake("prune gpt --keep many --yes", 2, "'--keep'", "integer"),
    Mistake("prune gpt --keep-best loss --yes", 2, "'loss'", "METRIC:min:N"),
    Mistake("prune gpt --keep-within soon --yes", 2, "'soon'", "7d"),
    Mistake("prune gpt --max-bytes much --yes", 2, "'much'", "2.5GB"),
    Mistake("rm gpt@20", 2, "nothing was deleted", "--yes"),
    Mistake("rm gpt@40 --yes", 6, "newest", "--force"),
    Mistake("verify", 2, "nothing to verify", "for all runs"),
    # Files
    Mistake("export gpt@40 --to {folder}/x.bin", 2, "x.bin", "--format"),
    Mistake("import {folder}/none.pt r@1", 2, "none.pt does not exist", "Pass a file or folder"),
    Mistake("cp gpt@40", 2, "no store to copy to is given", "--to STORE"),
    # Targets
    Mistake("ls", 2, "neither a daemon nor a store is set", "--store", store=False),
    Mistake("ls --store /mnt/not-there", 7, "there is no folder /mnt/not-there", "mounted", store=False),
    Mistake("ls --url {folder}", 2, "is not the URL of a daemon", "--store for a store", store=False),
    Mistake("ls --store http://h", 2, "is not the URL of a store", "--url for a daemon", store=False),
    Mistake("ls --url http://h --store /s", 2, "both a daemon", "", store=False),
    Mistake("ls --url http://127.0.0.1:{port}", 7, "did not respond", "Check that it runs", store=False),
]


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def attempt(mistake: Mistake, folder: Path, port: int) -> Finished:
    words = mistake.typed.replace("'", "").format(folder=folder, port=port).split()
    return invoke(*words, env={"CKPT_STORE": str(folder)} if mistake.store else {})


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_a_mistake_is_answered_with_its_cause_and_its_remedy(mistake: Mistake, unchanged: Path, port: int) -> None:
    before, done = sorted(unchanged.rglob("*")), attempt(mistake, unchanged, port)
    assert done.code == mistake.code
    assert done.stdout == "" or mistake.typed == "prune gpt --keep 1", "which shows its plan"
    assert done.stderr.startswith("error: ")
    assert mistake.cause in done.stderr
    assert mistake.remedy in done.stderr
    assert ".." not in done.stderr.replace("'..'", "").replace("...", "").replace("../x", "")
    assert sorted(unchanged.rglob("*")) == before
