"""A complete cycle in one command: train, save, SIGKILL, resume, compare, list, prune.

Starts a daemon on SQLite and a local folder, trains train_gpt.py once without interruption and once
killed twice, and compares the two loss curves step for step. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RUN = "gpt-demo"
KEEP = 5
DEADLINE_S = 120.0
HERE = Path(__file__).parent
console = Console(highlight=False)


class DemoFailed(Exception):
    """A step of the demonstration had the wrong result."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Length of the training, and the steps at which it is killed."""

    folder: Path
    steps: int
    save_every: int

    @property
    def first_kill(self) -> int:
        """A step that is saved: the trainer dies right after save_async returned."""
        return self.save_every * (self.steps // self.save_every * 2 // 5)

    @property
    def last_save(self) -> int:
        """The last step saved before the second kill."""
        return self.save_every * (self.steps // self.save_every * 3 // 4)

    @property
    def second_kill(self) -> int:
        """A step between two saves: the steps after the last save have to be repeated."""
        return self.last_save + self.save_every // 2


@dataclass(frozen=True, slots=True)
class Curve:
    """The log of one process: losses by step, and a hash of the final weights if it finished."""

    name: str
    losses: dict[int, float]
    weights: str | None

    @staticmethod
    def read(name: str, log: Path) -> Curve:
        """The curve in a log file."""
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses = {record["step"]: record["loss"] for record in records if "step" in record}
        weights = [record["weights"] for record in records if "weights" in record]
        return Curve(name, losses, weights[0] if weights else None)


def main() -> int:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "demo-out", help="a folder to be emptied and used")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--save-every", type=int, default=8)
    args = parser.parse_args()
    plan = Plan(args.out.resolve(), args.steps, args.save_every)
    shutil.rmtree(plan.folder, ignore_errors=True)
    # Notes of trainers on this host would outlive the store that the next demonstration empties.
    temporary = plan.folder / "tmp"
    temporary.mkdir(parents=True)
    os.environ["TMPDIR"] = str(temporary)
    began = time.monotonic()
    try:
        demonstrate(plan)
    except DemoFailed as error:
        console.print(f"\n[bold red]FAILED:[/] {error}")
        return 1
    console.print(f"\n[bold green]Everything worked[/], in {time.monotonic() - began:.0f} s.")
    return 0


def demonstrate(plan: Plan) -> None:
    """All steps, in order."""
    (plan.folder / "store").mkdir()
    store = f"file://{plan.folder}/store"
    chapter("A daemon on SQLite and a local folder")
    with daemon(plan.folder, store) as url:
        trainer = Trainer(plan, store, url)

        chapter("The reference: an uninterrupted training, in a store of its own")
        reference = Trainer(plan, f"file://{plan.folder}/reference", None).run("reference")

        chapter(f"Again, and SIGKILL as soon as save_async of step {plan.first_kill} has returned")
        first = trainer.run("first", kill_at=plan.first_kill)
        await_checkpoint(url, plan.first_kill)

        chapter(f"Started again; SIGKILL at step {plan.second_kill}, between two saves")
        second = trainer.run("second", kill_at=plan.second_kill)
        await_checkpoint(url, plan.last_save)

        chapter("Started again, and not interrupted")
        third = trainer.run("third")

        chapter("Is it the same training?")
        compare(reference, [first, second, third], [1, plan.first_kill + 1, plan.last_save + 1])

        chapter("For orchestrators and operators")
        operate(url, plan)


def chapter(title: str) -> None:
    """A heading."""
    console.print(f"\n[bold cyan]── {title}[/]")


@contextmanager
def daemon(folder: Path, store: str) -> Iterator[str]:
    """A running ckptd; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["serve", "--store", store, "--db", f"sqlite:///{folder}/index.db", "--port", str(port)]
    command += ["--auth", "off", "--cache-bytes", "0"]  # the store is a folder of this machine, and so are we
    console.print(f"$ ckptd {' '.join(command)} &", soft_wrap=True)
    url = f"http://127.0.0.1:{port}"
    with (folder / "ckptd.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "ckptd", *command], stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: process.poll() is not None or answers(f"{url}/readyz"), "ckptd to be ready")
            if process.poll() is not None:
                raise DemoFailed(f"ckptd ended with {process.returncode}: {(folder / 'ckptd.log').read_text()}")
            console.print(f"ready at {url}")
            yield url
        finally:
            process.terminate()
            process.wait(30)


@dataclass(frozen=True, slots=True)
class Trainer:
    """Starts train_gpt.py, always with the same arguments."""

    plan: Plan
    store: str
    daemon: str | None

    def run(self, name: str, kill_at: int | None = None) -> Curve:
        """Train to the end, or until the log shows step `kill_at`: then SIGKILL."""
        log = self.plan.folder / f"{name}.jsonl"
        arguments = ["--store", self.store, "--run-name", RUN, "--steps", str(self.plan.steps)]
        arguments += ["--save-every", str(self.plan.save_every), "--loss-log", str(log)]
        if self.daemon:
            arguments += ["--daemon", self.daemon]
        process = subprocess.Popen([sys.executable, str(HERE / "train_gpt.py"), *arguments])
        try:
            if kill_at is not None:
                self._kill(process, log, kill_at)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        if code != (0 if kill_at is None else -signal.SIGKILL):
            raise DemoFailed(f"the trainer ended with {code}")
        return Curve.read(name, log)

    def _kill(self, process: subprocess.Popen[bytes], log: Path, step: int) -> None:
        wait_until(lambda: process.poll() is not None or reached(log, step), f"step {step}", poll_s=0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        console.show_cursor()  # the killed process had hidden it
        console.print(f"\n[bold red]SIGKILL[/] at step {max(Curve.read('', log).losses)}")


def reached(log: Path, step: int) -> bool:
    """Whether the log holds a line for the step; the line is written after save_async returned."""
    return log.exists() and f'{{"step": {step}, ' in log.read_text()


def await_checkpoint(url: str, step: int) -> None:
    """The saver outlives the trainer: an accepted save becomes durable although the trainer is gone."""
    began = time.monotonic()
    seen: list[int | None] = []

    def committed() -> bool:
        latest = get_json(f"{url}/checkpoints/latest?run={RUN}")
        seen.append(latest and latest["step"])
        return seen[-1] == step

    wait_until(committed, f"the checkpoint of step {step}", poll_s=0.01)
    console.print(f"latest at the daemon: step {seen[0]}", end="")
    if seen[0] != step:
        console.print(f"; {time.monotonic() - began:.2f} s later: step {step}, committed by the saver process", end="")
    console.print()


def compare(reference: Curve, parts: Sequence[Curve], starts: Sequence[int]) -> None:
    """Every loss of every part against the reference; then the weights."""
    table = Table("process", "steps", "losses equal to the reference, bit for bit")
    wrong = []
    for part, start in zip(parts, starts, strict=True):
        equal = [step for step, loss in part.losses.items() if loss == reference.losses[step]]
        wrong += sorted(set(part.losses) - set(equal))
        table.add_row(part.name, f"{min(part.losses)} to {max(part.losses)}", f"{len(equal)} of {len(part.losses)}")
        if min(part.losses) != start:
            raise DemoFailed(f"the {part.name} process began at step {min(part.losses)}, not at {start}")
    console.print(table)
    covered = {step for part in parts for step in part.losses}
    if wrong or covered != set(reference.losses):
        raise DemoFailed(f"losses differ at steps {wrong}, missing steps {sorted(set(reference.losses) - covered)}")
    if parts[-1].weights is None or parts[-1].weights != reference.weights:
        raise DemoFailed("the losses are equal, but the final weights are not")
    twice = sum(len(part.losses) for part in parts) - len(covered)
    console.print(
        f"[bold green]The loss curve is the uninterrupted one, exactly[/]: all {len(covered)} steps, "
        f"{twice} of them computed twice; the final weights have the same SHA-256."
    )


def operate(url: str, plan: Plan) -> None:
    """Requests of an orchestrator and commands of an operator."""
    show_latest(f"{url}/checkpoints/latest?run={RUN}")
    ckptctl("ls", "--url", url, RUN)
    ckptctl("prune", "--url", url, RUN, "--keep", str(KEEP), "--yes")
    ckptctl("ls", "--url", url, RUN)
    page = get_json(f"{url}/v1/checkpoints?run={RUN}") or {"items": []}
    steps = [item["step"] for item in page["items"]]
    if steps != list(range(plan.steps // plan.save_every * plan.save_every, 0, -plan.save_every))[:KEEP]:
        raise DemoFailed(f"after the prune there are the steps {steps}")


def show_latest(url: str) -> None:
    """The output of curl; without curl, the same request from Python."""
    console.print(f"$ curl '{url}'", soft_wrap=True)
    if shutil.which("curl"):
        answer = subprocess.run(["curl", "--silent", "--fail", url], check=True, capture_output=True).stdout
    else:
        answer = urllib.request.urlopen(url).read()
    console.print_json(answer.decode())


def ckptctl(*arguments: str) -> None:
    """Run a command of the operators' tool."""
    console.print(f"\n$ ckptctl {' '.join(arguments)}", soft_wrap=True)
    program = Path(sys.executable).with_name("ckptctl")
    code = subprocess.run([program, *arguments]).returncode
    if code:
        raise DemoFailed(f"ckptctl {arguments[0]} ended with {code}")


def get_json(url: str) -> Any:
    """The response as JSON; None if there is none (yet)."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError):
        return None


def answers(url: str) -> bool:
    """Whether the URL answers with success."""
    return get_json(url) is not None


def wait_until(condition: Callable[[], bool], what: str, poll_s: float = 0.1) -> None:
    """Poll with a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise DemoFailed(f"waited {DEADLINE_S:.0f} s for {what}")
        time.sleep(poll_s)


if __name__ == "__main__":
    sys.exit(main())
