import json
import subprocess
import sys

from tests.support.command_line import clean_environment

HEAVY = ("torch", "safetensors", "httpx", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "s3fs")


def loaded_by(statement: str) -> set[str]:
    script = f"import sys, json; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], env=clean_environment(), capture_output=True, check=True)
    return {str(name) for name in json.loads(done.stdout)}


def test_the_command_line_loads_nothing_heavy() -> None:
    loaded = loaded_by("import ckptctl.cli")
    assert loaded & {*HEAVY, "numpy", "fsspec", "ckptapi", "ckptstore.commits", "yaml", "rich.progress"} == set()
    assert {name for name in loaded if name.startswith("ckptctl.commands.")} == set()


def test_version_and_help_load_no_command() -> None:
    for option in ("--version", "--help"):
        ran = loaded_by(
            "import io, sys; from contextlib import redirect_stdout as to; from ckptctl.cli import app\n"
            f"try:\n  with to(io.StringIO()): app([{option!r}])\nexcept SystemExit: pass\n0"
        )
        assert "ckptctl.cli" in ran
        assert {name for name in ran if name.startswith("ckptctl.commands")} == set()
        assert (
            ran & {"numpy", "fsspec", "ckptapi", "ckptctl.session", "ckptctl.render", "rich", "msgspec", *HEAVY}
            == set()
        )


def test_a_command_loads_itself_only() -> None:
    loaded = loaded_by("from ckptctl.cli import _load; _load('export', 'foreign.export')")
    assert "ckptctl.commands.foreign" in loaded
    assert "ckptctl.commands.plan" not in loaded
    assert loaded & {*HEAVY, "ckpt.capture", "ckpt.checkpointer", "ckptd", "numpy.random", "rich.progress"} == set()


def test_only_a_torch_file_loads_torch() -> None:
    safetensors = "from ckpt.foreign.exporting import FileFormat, writer_of; writer_of(FileFormat.SAFETENSORS, 1)"
    assert "torch" not in loaded_by(safetensors)
    loaded = loaded_by(safetensors.replace("SAFETENSORS", "TORCH"))
    assert {"torch", "ckpt.foreign.writing"} <= loaded
    assert loaded & {"ckpt.checkpointer", "ckpt.save", "ckpt.restore", "fastapi"} == set()
