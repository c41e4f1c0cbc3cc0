"""Plays the first hour of a new user with real programs: where all is well, nothing may look wrong.

    python -m tests.integration.first_hour [SCENE...]        (make first-hour)

A scene is a home folder, a shell, and a daemon with its defaults. Looked at are each log record at WARNING or above in
every process, Python warnings of this project's files or below them, and stderr; then, while the daemon runs, its
pages and `ckptctl ls`, `runs` and `doctor`. Runs that ended must be shown as finished.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
from jupyter_client.manager import KernelManager  # type: ignore[import-not-found, unused-ignore]

from tests.docs.blocks import ROOT, blocks
from tests.support.ports import free_port
from tests.support.seaweed import BUCKET, running_service
from tests.support.waiting import wait_until

_RED = re.compile(
    r'<[^>]*class="(?:[^">]* )?(?:bad|stalled|vanished|died|error|failed|expired|corrupt|behind|lost)[" ][^>]*>[^<]*'
)
_NOT_DRAWN = re.compile(r' rx="| width="0\.0"')  # of a legend, or empty
_WRONG = re.compile(r"\x1b\[(?:\d+;)*31m|\bwrong\b")
_ALARM = re.compile(r"\b(?:WARNING|ERROR|CRITICAL|Traceback|Exception ignored|leaked|Killed|wrong)\b|Error: |error: ")
_FOREIGN = re.compile(r"WARNING (?!ckpt)\S+ |\[IPKernelApp\]")  # said by other programs
# Each Python process of a scene loads it when it starts; it changes nothing of what is logged and shown.
_LISTENER = """
import logging, os, sys, warnings
def note(text):
    with open(os.environ["HOUR_NOTES"], "a") as file:
        file.write(" ".join(text.split()) + "\\n")
def handle(self, record, handle=logging.Logger.handle):
    if record.levelno >= logging.WARNING:
        note(f"{record.levelname} {record.name} {record.getMessage()}")
    handle(self, record)
def show(message, category, filename, lineno, *rest, show=warnings.showwarning):
    frame, files = sys._getframe(), [filename]
    while frame := frame.f_back:
        files.append(frame.f_code.co_filename)
    if any(file.startswith(tuple(os.environ["HOUR_FILES"].split(":"))) for file in files):
        note(f"{category.__name__} {filename}:{lineno} {message}")
    show(message, category, filename, lineno, *rest)
logging.Logger.handle, warnings.showwarning = handle, show
"""
_SERVE = """
mkdir -p ckpts; ckptd serve --store $STORE --auth off &
export CKPTD_URL=http://localhost:$CKPTD_PORT; ckptctl doctor --wait 30s
"""
_STAYS = "\ntouch ended; read -r _ || true; kill $(jobs -p) || true; wait"


class Scene:
    """A user with nothing but a folder. A context manager: at its end, nothing runs."""

    def __init__(self, scene: str, folder: Path) -> None:
        self.folder = folder / scene
        for part in ("tmp", "listener", "ckpts"):
            (self.folder / part).mkdir(parents=True)
        for name, text in (("listener/sitecustomize.py", _LISTENER), ("notes", ""), ("out", ""), ("err", "")):
            self.write(name, text)
        port, self.lines, self.findings = free_port(), 0, list[str]()
        self.url, self.store = f"http://localhost:{port}", f"file://{self.folder}/ckpts"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CKPT", "PYTHON", "XDG_"))}
        self.env = inherited | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self.folder), "BROWSER": "true",
            "TMPDIR": f"{self.folder}/tmp", "CKPTD_PORT": str(port), "PYTHONPATH": f"{self.folder}/listener",
            "HOUR_NOTES": f"{self.folder}/notes", "HOUR_FILES": f"{ROOT}/client:{ROOT}/ckptd",
        }  # fmt: skip
        self._shell: subprocess.Popen[bytes] | None = None

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(dedent(text))

    def page(self, name: str) -> str:
        """The commands that a page shows; its Python becomes files: a block without a name is train.py, run twice."""
        commands = ""
        for block in [one for one in blocks(ROOT / name) if not one.not_run]:
            text = block.text.replace("file:///tmp/ckpts", self.store).replace("http://localhost:8470", self.url)
            if block.language == "python":
                self.write(block.title or "train.py", text)
                commands += "" if block.title else "python train.py\npython train.py\n"
            elif block.language == "sh":
                commands += re.sub("^pip install .*", "", text, flags=re.MULTILINE)
        return commands

    def play(self, commands: str, env: dict[str, str] | None = None, token_file: str = "") -> subprocess.Popen[bytes]:
        """Run commands in a shell, and look at the result. It stays, with its daemon, until its input ends."""
        self.env |= {"STORE": self.store, **(env or {})}
        with (self.folder / "out").open("a") as out, (self.folder / "err").open("a") as err:
            command = ["bash", "-eu", "-o", "pipefail", "-c", dedent(commands) + _STAYS]
            self._shell = shell = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=self.folder, env=self.env
            )
        wait_until(lambda: (self.folder / "ended").exists() or shell.poll() is not None, "the end", 300)
        said = [*self._read("out")[-5:], *self._read("err")[-15:]]
        assert shell.poll() is None, "\n".join(["the shell ended", *said])
        self._look((self.folder / token_file).read_text().strip() if token_file else "")
        return shell

    def _look(self, token: str) -> None:
        with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"} if token else {}) as client:
            runs = [row["run"] for row in client.get("/v1/runs").json()["items"] if row["num_checkpoints"]]
            for run in runs:
                seen = (f"the end of {run}", 60.0)
                wait_until(lambda: 'class="state finished"' in self._see(client, f"/runs/{run}"), *seen)  # noqa: B023
                latest = client.get("/v1/checkpoints/latest", params={"run": run}).json()["id"]
                for path in (f"/?q={run}", f"/goodput/{run}", f"/checkpoints/{latest}"):
                    self._see(client, path)
            for path in ("/", "/store", "/jobs", "/restores", "/attempts"):
                self._see(client, path)
        asked = {"FORCE_COLOR": "1", "CKPTD_URL": self.url, **({"CKPT_TOKEN": token} if token else {})}
        for command in ("ls", "ls *", "runs", "doctor"):
            words, env = ["ckptctl", *command.split()], self.env | asked
            done = subprocess.run(words, env=env, cwd=self.folder, capture_output=True, text=True)
            said = (done.stdout + done.stderr).splitlines()
            self.lines += len(said)
            self.findings += [f"ckptctl {command}: {line}" for line in said if _WRONG.search(line) or done.returncode]

    def _see(self, client: httpx.Client, path: str) -> str:
        answer = client.get(path)
        self.lines += answer.text.count("\n")
        found = [text for text in _RED.findall(answer.text) if not _NOT_DRAWN.search(text)]
        found += [str(answer.status_code)] * (answer.status_code != 200)
        self.findings += [finding for text in found if (finding := f"{path}: {text}") not in self.findings]
        return answer.text

    def cells(self, cells: Iterable[str]) -> None:
        """Run cells in a kernel of Jupyter. stderr is red there, and what a cell returns should be short."""

        def show(message: dict[str, Any]) -> None:
            content = message["content"]
            shown = content.get("data", {}).get("text/plain", "")
            if content.get("name") == "stderr" or len(shown) > 160:
                self.findings.append(f"{cell} shows {content}")
            if "interrupt me" in content.get("text", ""):
                manager.interrupt_kernel()
            self.lines += 1

        manager = KernelManager()
        with (self.folder / "err").open("a") as err:
            manager.start_kernel(cwd=str(self.folder), env=self.env | {"CKPT_STORE": self.store}, stderr=err)
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            for cell in cells:
                reply = client.execute_interactive(cell, timeout=300, output_hook=show)["content"]
                assert reply["status"] == ("error" if "interrupt me" in cell else "ok"), f"{cell}: {reply}"
        finally:
            client.stop_channels()
            manager.shutdown_kernel()

    def _read(self, name: str) -> list[str]:
        return (self.folder / name).read_text(errors="replace").splitlines()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._shell is not None:
            self._shell.communicate()
        notes, errors = self._read("notes"), self._read("err")
        self.lines += len(notes) + len(errors) + len(self._read("out"))
        self.findings += [line for line in (*notes, *errors) if not _FOREIGN.match(line)
                          and (line in notes or _ALARM.search(line))]  # fmt: skip
        self.findings += [str(error)] * isinstance(error, AssertionError)
        return isinstance(error, AssertionError)


# The example, with a validation that saves, and early stopping.
_LIGHTNING = {
    "from torch import nn\n": "from torch import nn\nfrom lightning.pytorch.callbacks import EarlyStopping\n",
    "    def on_train_batch_end": """    def validation_step(self, batch, number):
        self.log("val_loss", self.training_step(batch, number))
    def on_train_batch_end""",
    "every_n_train_steps=5": 'every_n_train_steps=5, monitor="val_loss"', "max_steps=max_steps": "max_epochs=max_steps",
    "[saves]": '[EarlyStopping("val_loss"), saves]', "shuffle=True)": "shuffle=True), DataLoader(data, batch_size=8)",
}  # fmt: skip
_LOADED = """
import torch, safetensors.torch, transformers
saved = safetensors.torch.load_file("alone.safetensors")
exported = transformers.GPT2LMHeadModel.from_pretrained("hub").state_dict()
names = [name for name in saved if name.startswith("model/")]
assert names and all(torch.equal(exported[name.removeprefix("model/")], saved[name]) for name in names)
"""
_LOOP = """
import torch, ckpt
def train(checkpointer, first, last, model=torch.nn.Linear(8, 1)):
    optim = torch.optim.AdamW(model.parameters())
    checkpointer.restore(model, optim)
    for step in range(first, last):
        loss = model(torch.ones(4, 8)).square().mean()
        optim.zero_grad(); loss.backward(); optim.step()
        handle = checkpointer.save_async(model, optim, step, metrics={"loss": loss.item()})
    return handle
"""
_TRIALS = f"""{_LOOP}
for rate in (a * 10.0**b for b in range(-5, 0) for a in (1, 2, 3, 5)):
    with ckpt.Checkpointer(run=f"sweep/lr={{rate:g}}") as trial:
        train(trial, 0, 3)
"""
_CELLS = (
    _LOOP, 'ckpt.init(run="nb")', "handle = train(ckpt, 0, 3); handle", "handle.result()", 'ckpt.init(run="nb")',
    "train(ckpt, 3, 8).result(); print('interrupt me'); import time; time.sleep(60)", "ckpt.wait(); ckpt.restore()",
    "train(ckpt, 8, 9).result()", "ckpt.checkpoints()[:1]", "len(ckpt.checkpoints())",
    "assert {c.state.value for c in ckpt.checkpoints()} == {'committed'}, 'a cell that was run again'", "ckpt.close()",
)  # fmt: skip


def _play(name: str, scene: Scene) -> None:
    match name:
        case "README" | "start":
            scene.play(scene.page("README.md" if name == "README" else "docs/start.md"))
        case "lightning":
            program = (ROOT / "examples" / "train_lightning.py").read_text()
            for old, new in _LIGHTNING.items():
                assert old in program
                program = program.replace(old, new)
            scene.write("train.py", program)
            scene.play(f"{_SERVE}\nfor epochs in 3 40; do python train.py $STORE $epochs; done")
        case "transformers":
            scene.write("loaded.py", _LOADED)
            scene.play(f"""{_SERVE}
                for end in 4 10; do python {ROOT}/examples/train_transformers.py $STORE $end; done
                ckptctl export transformers@10 --to hub --format huggingface
                ckptctl export transformers@10 --to alone.safetensors
                python loaded.py""")
        case "notebook":
            scene.cells(_CELLS)
            scene.play(_SERVE)
        case "sweep":
            scene.write("train.py", _TRIALS)
            scene.play(f"""{_SERVE}
                CKPT_STORE=$STORE python train.py
                ckptctl ls 'sweep/*' --sort metric:loss --limit 3
                ckptctl policy set 'sweep/*' --keep 1 --keep-best loss:min:1; ckptctl policy show
                ckptctl rm sweep/lr=0.1 --all --yes; ckptctl undelete sweep/lr=0.1
                ckptctl undelete sweep/lr=0.1@2; ckptctl ls sweep/lr=0.1 | grep lr=0.1@2
                ckptctl rm sweep/lr=0.2 --all --yes""")
        case "S3":
            with tempfile.TemporaryDirectory() as folder, running_service(Path(folder)) as service:
                scene.store = f"s3://{BUCKET}/ckpts"
                scene.page("README.md")
                trained = "ckptctl probe --store $STORE; python train.py; python train.py"
                scene.play(f"{trained}\n{_SERVE}\nckptctl verify demo", service.environment).communicate()
        case "tokens":
            scene.page("README.md")
            scene.write("restore.py", "import ckpt; ckpt.init(run='demo'); assert ckpt.restore().step == 150")
            scene.play("""
                export CKPTD_STORE=$STORE; ckptd token create admin --scope admin >admin; ckptd serve &
                export CKPTD_URL=http://localhost:$CKPTD_PORT CKPT_TOKEN=$(cat admin); ckptctl doctor --wait 30s
                ckptctl token create reader --scope read >reader
                ckptctl token create trainer --scope read --scope write --run 'demo*' >trainer
                CKPT_TOKEN=$(cat trainer) python train.py
                until ckptctl latest demo | grep demo@150; do sleep 0.2; done
                CKPT_TOKEN=$(cat reader) python restore.py
                ! CKPT_TOKEN=$(cat reader) ckptctl rm demo@50 --yes 2>refused; grep prune refused""",
                token_file="admin",
            )  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Play these scenes, or all of them; 1 if there are findings."""
    findings: list[str] = []
    print("scene         seconds  lines  findings")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ("README", "start", "lightning", "transformers", "notebook", "sweep", "S3", "tokens"):
            began = time.monotonic()
            with Scene(name, Path(folder)) as scene:
                _play(name, scene)
            spent_s, count = time.monotonic() - began, len(scene.findings)
            print(f"{name:12}  {spent_s:7.0f}  {scene.lines:5}  {count:8}", flush=True)
            findings += [f"{name}: {finding}" for finding in scene.findings]
    print(*findings, sep="\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
