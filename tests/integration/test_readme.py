"""The README is short, and what it says can be done as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.command_line import run
from tests.support.daemons import running_daemon

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


def printed(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return str(found)


def train(program: str, folder: Path) -> str:
    script = folder / "train.py"
    script.write_text(program.replace("/tmp/ckpts", f"{folder}/ckpts"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT", "PYTHONWARN"))}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_at_most_90_lines() -> None:
    assert len(PAGE.splitlines()) <= 90


def test_its_program_trains_and_resumes_and_its_commands_answer(tmp_path: Path) -> None:
    program = printed("python")
    train(program.replace("200)", "120)"), tmp_path)
    store = f"file://{tmp_path}/ckpts"
    assert [body["step"] for body in run("ls", "demo", "--store", store, "-o", "json").json] == [100, 50, 0]
    resumed = program.replace("batches =", "print(restored.step)\nbatches =")
    assert train(resumed, tmp_path) == "100\n"
    assert [body["step"] for body in run("ls", "demo", "--store", store, "-o", "json").json] == [150, 100, 50, 0]
    with running_daemon(store) as daemon:
        commands = re.findall(r"^    (ckptctl \w+(?: \w+)?|curl \S+)", PAGE, re.M)
        assert {command.split()[1] for command in commands} >= {"ls", "open"}
        for command in commands:
            words = command.split()[1:]
            if command.startswith("curl"):
                assert daemon.get(words[0].strip('"').removeprefix("$CKPTD_URL")).json()["step"] == 150
            else:
                extra = ("--no-browser",) if words[0] == "open" else ()
                assert run(*words, *extra, "--url", daemon.url).code == 0


def test_its_figures_are_those_of_the_full_benchmarks() -> None:
    def ratio(bench: str, name: str, vs: str) -> float:
        goals = json.loads((ROOT / f"bench/results/full/{bench}.json").read_text())["goals"]
        (found,) = [goal["ratio"] for goal in goals if (goal["name"], goal["vs"]) == (name, vs)]
        return float(found)

    text = " ".join(PAGE.split())
    assert f"{ratio('durable-disk', 'torch.save', 'ckptd, raw'):.1f} times as fast as `torch.save` with fsync" in text
    assert f"{ratio('durable-disk', 'dcp', 'ckptd, raw'):.1f} times as fast as torch's DCP" in text
    assert "a restore takes a quarter of DCP's time" in text
    assert 1 / ratio("restore-warm", "dcp", "ckptd, raw") < 0.275
