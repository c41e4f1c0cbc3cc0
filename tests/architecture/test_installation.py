"""What each extra brings, seen from a fresh virtual environment. Needs a package index, like `make setup`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution."""
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The bin folder of an environment with the distribution and no extra."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    install(folder / "bin", str(wheel))
    return folder / "bin"


def built(folder: Path, **environment: str) -> Path:
    """The wheel that pip builds with these variables."""
    pip = ["pip", "wheel", "--quiet", "--retries", "10", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *pip], env={**os.environ, **environment}, check=True)
    [found] = folder.iterdir()
    return found


def install(programs: Path, requirement: str) -> None:
    """Install with the project's pins, by the pip of this environment."""
    pip = ["-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--retries", "10"]
    run(Path(sys.executable), *pip, "--no-compile", "-c", str(ROOT / "constraints.txt"), requirement)


def run(program: Path, *arguments: str) -> str:
    """Standard output of a program that must succeed."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, cwd=program.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def missing(programs: Path, *modules: str) -> list[str]:
    """Which of these modules the environment does not have."""
    script = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    return run(programs / "python", "-c", script, *modules).split()


@contextmanager
def served(programs: Path, folder: Path) -> Iterator[str]:
    """The URL of a daemon that runs in the environment."""
    (folder / "store").mkdir()
    log = folder / "log"
    arguments = ["serve", "--store", f"file://{folder}/store", "--db", f"sqlite:///{folder}/db", "--port", "0"]
    arguments += ["--cache", f"{folder}/cache", "--auth", "off"]
    with log.open("w") as stderr:
        process = subprocess.Popen([programs / "ckptd", *arguments, "--notice-seconds", "0"], stderr=stderr)
    try:
        wait_until(lambda: process.poll() is not None or "listening on http" in log.read_text(), "the daemon's start")
        assert process.poll() is None, log.read_text()
        yield log.read_text().partition("listening on ")[2].split()[0]
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_without_extras_there_is_what_a_trainer_needs(programs: Path) -> None:
    run(programs / "python", "-c", "import ckptstore.reading.fetch, ckptapi.client, ckpt")
    run(programs / "ckpt-run", "--help")
    absent = ["torch", "fastapi", "sqlalchemy", "s3fs", "safetensors", "typer", "rich", "yaml", "pygments"]
    assert missing(programs, "ckptstore", *absent) == absent
    for program, extra in (("ckptd", "server"), ("ckptctl", "cli")):
        refused = subprocess.run([programs / program, "serve"], capture_output=True, text=True)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert f"pip install 'ckptd[{extra}]'" in refused.stderr


@pytest.mark.slow
def test_the_loops_of_float_split_are_compiled_where_there_is_a_compiler(programs: Path, tmp_path: Path) -> None:
    asked = "from ckptstore.codecs.fused import IS_BUILT; print(IS_BUILT)"
    assert run(programs / "python", "-c", asked).strip() == str(shutil.which("cc") is not None)
    assert built(tmp_path, CC="/without/compiler").name.split("-", 2)[2] == "py3-none-any.whl"


@pytest.mark.slow
def test_the_extra_cli_runs_the_command_line(programs: Path, wheel: Path) -> None:
    install(programs, f"{wheel}[cli]")
    assert run(programs / "ckptctl", "--version").startswith("ckptctl ")
    assert (programs.parent / "share/man/man1/ckptctl.1").stat().st_size > 1000
    assert missing(programs, "typer", "fastapi", "torch") == ["fastapi", "torch"]


@pytest.mark.slow
def test_the_server_extra_runs_the_daemon_without_torch(programs: Path, wheel: Path, tmp_path: Path) -> None:
    install(programs, f"{wheel}[server]")
    assert run(programs / "ckptd", "--version").startswith("ckptd ")
    with served(programs, tmp_path) as url:
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, "readiness")
        assert httpx.get(f"{url}/checkpoints/latest").json()["code"] == "no_checkpoint"
        assert "There are no checkpoints yet" in httpx.get(url).text
        assert httpx.get(f"{url}/static/ckptd.css").status_code == 200
    assert missing(programs, "fastapi", "torch") == ["torch"]
