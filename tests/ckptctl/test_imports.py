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
    assert "ckptctl.commands.export" in loaded
    assert loaded & {*HEAVY, "ckpt.capture", "ckpt.checkpointer", "ckptd", "numpy.random", "rich.progress"} == set()


def test_only_a_torch_file_loads_torch() -> None:
    safetensors = "from ckptctl.exporting_formats import FileFormat, writer_of; writer_of(FileFormat.SAFETENSORS, 1)"
    assert "torch" not in loaded_by(safetensors)
    loaded = loaded_by(safetensors.replace("SAFETENSORS", "TORCH"))
    assert {"torch", "ckpt.foreign.writing"} <= loaded
    assert loaded & {"ckpt.checkpointer", "ckpt.save", "ckpt.restore", "fastapi"} == set()
