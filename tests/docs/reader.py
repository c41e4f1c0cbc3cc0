"""A reader who does what a page says: an interpreter, a shell with the variables it exports, and a folder.

Where a page names a store or the daemon's port, the reader uses others, so that tests do not meet. `python FILE`,
`torchrun`, `ckptctl` and `ckptd serve` are forks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.ckpt.integrations.test_lightning import LIGHTNING
from tests.ckpt.integrations.test_transformers import TRANSFORMERS
from tests.docs.blocks import ROOT, Block
from tests.support.forking import COMMAND_LINE, DAEMON, TRAINER, Fork, fork
from tests.support.ports import free_port

_DEADLINE_S = 120.0
_PROGRAMS = Path(sys.executable).parent
_END, _FAILED = "--the-block-ended--", "--the-shell-ended--"
_WAIT = """mkdir -p ckpts  # in place of the mounted volume
for i in $(seq 600); do
    curl -fs "http://127.0.0.1:$CKPTD_PORT/readyz" >.ready && break
    curl -fsk "https://127.0.0.1:$CKPTD_PORT/readyz" >.ready && break
    sleep 0.1
done"""
_FRAMEWORKS = {"lightning": LIGHTNING.imports, "transformers": TRANSFORMERS.imports}
_TRAINING = re.compile(
    r"^(?:python|torchrun(?: --standalone)? --nproc-per-node[= ](?P<ranks>\d+)) (?P<rest>\S+\.py.*)$"
)


class Reader:
    """A context manager. It ends what it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = free_port()
        self._session: tuple[socket.socket, Fork] | None = None
        self._daemons: list[Fork] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT", "PYTHON"))}
        environment |= {
            "PATH": f"{_PROGRAMS}:{os.environ['PATH']}",
            "CKPTD_PORT": str(self._port), "CKPTD_POLL_SECONDS": "0.2", "CKPTD_NOTICE_SECONDS": "0",
            "XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache", "HOME": str(folder),
            "BROWSER": "true", "COLUMNS": "150", "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
            "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        self._shell = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            cwd=folder, env=environment, text=True, start_new_session=True,
        )  # fmt: skip
        self._in_shell(f"trap 'echo {_FAILED}' EXIT")  # a daemon holds the pipe open

    def do(self, block: Block, where: str) -> str:
        """Run a block; returns what it prints. AssertionError if it fails."""
        code = self._adapted(block.text)
        if block.is_file:
            (self.folder / block.title).write_text(code)
            return ""
        if block.language == "python":
            return self._python(code, where)
        commands = re.sub(r"\\\n\s*", "", code).splitlines()
        return "".join(self._command(command) for command in _joined(commands))

    def environment(self) -> dict[str, str]:
        file = self.folder / ".environment"
        self._in_shell(f"env -0 >{file}")
        return dict(line.split("=", 1) for line in file.read_text().split("\0") if "=" in line)

    def _adapted(self, text: str) -> str:
        text = re.sub(
            r"(file://)?(?:/tmp/ckpts|/mnt/checkpoints)|s3://(?:bucket/)?ckpts",
            lambda m: f"{m[1] or ''}{self.folder}/ckpts",
            text,
        )
        return text.replace("8470", str(self._port))

    def _command(self, command: str) -> str:
        if command.split("#")[0].strip().startswith("pip install"):
            return ""
        plain = command.split(" #")[0].strip()
        if match := _TRAINING.match(plain):
            file, *arguments = shlex.split(match["rest"])
            return self._run(self._imports(file), file, *arguments, ranks=int(match["ranks"] or 0))
        if plain.startswith("ckptctl ") and not re.search(r"[|>;&$`]", re.sub("'.*?'", "", plain)):
            return self._run(COMMAND_LINE, str(_PROGRAMS / "ckptctl"), *shlex.split(plain)[1:])
        if plain.startswith("ckptd serve ") and plain.endswith("&"):
            arguments = shlex.split(plain.removesuffix("&"))[1:]
            self._daemons.append(self._fork(DAEMON, str(_PROGRAMS / "ckptd"), arguments, self._errors.fileno()))
            return self._in_shell(_WAIT)
        return self._in_shell(command)

    def _in_shell(self, command: str) -> str:
        shell = self._shell
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f"{command}\necho {_END}\n")
        shell.stdin.flush()
        watch = threading.Timer(_DEADLINE_S, os.killpg, (shell.pid, signal.SIGKILL))
        watch.start()
        try:
            printed = ""
            for line in shell.stdout:
                if line.rstrip("\n").endswith(_END):
                    return printed + line.rstrip("\n").removesuffix(_END)
                if line.rstrip("\n").endswith(_FAILED):
                    break
                printed += line
        finally:
            watch.cancel()
        raise AssertionError(f"{command!r} failed\n{printed}\n{self._said()}")

    def _fork(
        self, imports: Sequence[str], file: str, arguments: Sequence[str], stdout: int, **environment: str
    ) -> Fork:
        return fork(
            imports, "tests.docs.program", [str(self.folder), file, *arguments], stdout=stdout,
            stderr=self._errors.fileno(), environment={**self.environment(), **environment},
        )  # fmt: skip

    def _imports(self, file: str) -> Sequence[str]:
        """Modules that the host of a training program imports: a framework takes 4 s of a core."""
        text = (ROOT / file if "/" in file else self.folder / file).read_text()
        found = (host for name, host in _FRAMEWORKS.items() if re.search(rf"^(?:import|from) {name}\b", text, re.M))
        return next(found, TRAINER)

    def _run(self, imports: Sequence[str], file: str, *arguments: str, ranks: int = 0) -> str:
        """Run a file; ranks: of torchrun, 0 without it."""
        file = str(ROOT / file) if "/" in file else file
        meeting = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
        }  # fmt: skip
        with tempfile.TemporaryFile("w+") as printed:
            started = [
                self._fork(imports, file, arguments, printed.fileno(), **(meeting | _rank(rank) if ranks else {}))
                for rank in range(ranks or 1)
            ]
            codes = [one.wait(_DEADLINE_S) for one in started]
            printed.seek(0)
            assert not any(codes), f"{file} ended with {codes}\n{printed.read()}\n{self._said()}"
            return printed.read()

    def _python(self, code: str, where: str) -> str:
        if self._session is None:
            self._session = self._begin_session()
        connection, _ = self._session
        with connection.makefile("rw") as stream:
            stream.write(json.dumps({"code": code, "where": where}) + "\n")
            stream.flush()
            answer = json.loads(stream.readline() or '{"error": "the interpreter is gone", "printed": ""}')
        assert not answer["error"], f"{answer['error']}\n{self._said()}"
        return str(answer["printed"])

    def _begin_session(self) -> tuple[socket.socket, Fork]:
        path = str(self.folder / ".session")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            errors = self._errors.fileno()
            process = fork(
                TRAINER, "tests.docs.session", [path], stdout=errors, stderr=errors, environment=self.environment()
            )
            listener.settimeout(_DEADLINE_S)
            connection, _ = listener.accept()
        connection.settimeout(_DEADLINE_S)
        return connection, process

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            self._session[0].close()
            self._session[1].wait(_DEADLINE_S)
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(_DEADLINE_S)
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.stdin.close()
        self._shell.stdout.close()
        self._shell.wait()
        self._errors.close()


def _rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _joined(lines: list[str]) -> list[str]:
    """Commands, of which functions, loops and here-documents have several lines; comments alone are left out."""
    commands: list[str] = []
    rest = ""
    for line in lines:
        rest += line + "\n"
        done = subprocess.run(["bash", "-n"], input=rest, text=True, capture_output=True, check=False)
        if done.returncode == 0 and "here-document" not in done.stderr:
            commands += [rest.rstrip("\n")] * bool(re.sub(r"^\s*#.*$", "", rest, flags=re.M).strip())
            rest = ""
    assert not rest, f"not a whole command: {rest}"
    return commands
