"""What a fresh interpreter loads: the linter sees import statements, this sees what they lead to."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import ckptd
import ckptplan
import ckptstore

WEB_AND_SQL = {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic"}
TRAINER = {"ckpt.capture", "ckpt.snapshot", "ckpt.restoring", "ckpt.ranks", "ckpt.checkpointer"}


def every_module_of(package: ModuleType) -> str:
    """A statement that imports all modules of a package but programs and migrations."""
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return f"import {', '.join(name for name in names if '__main__' not in name and '.migrations.' not in name)}"


def loaded_by(*statements: str) -> list[set[str]]:
    """Names of the modules that a new interpreter has after each of the statements."""
    shown = "print(json.dumps(list(sys.modules)))"
    script = "\n".join(["import json, sys", *(f"{statement}\n{shown}" for statement in statements)])
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_the_shared_format_and_the_daemon_load_no_torch() -> None:
    shared, daemon = loaded_by(every_module_of(ckptstore), every_module_of(ckptd))
    assert "ckptstore.format.documents" in shared
    assert shared & {"torch", "ckpt", "ckptd", *WEB_AND_SQL} == set()
    assert {"ckptd.app", "ckptd.commands"} <= daemon
    assert daemon & {"torch", "ckpt"} == set()


def test_the_training_library_loads_what_is_used() -> None:
    """One step after the other: each may load more. Nor are functions hidden by modules of their names."""
    library, plan, saver, functions, trainer = loaded_by(
        "import ckpt", f"{every_module_of(ckptplan)}; ckpt.plan", "import ckpt.saver.process",
        "ckpt.Checkpointer, ckpt.save_async, ckpt.restore, ckpt.load, ckpt.every",
        "import ckpt.snapshot.overlap, ckpt.restoring.objects; assert callable(ckpt.save) and callable(ckpt.restore)",
    )  # fmt: skip
    assert library & {"torch", "numpy", "ckptstore", *WEB_AND_SQL} == set()
    assert "ckptplan.plan" in plan
    assert plan & {"torch", "ckpt.checkpointer", "ckptd", *WEB_AND_SQL} == set()
    assert "ckptstore.commits.commit" in saver
    assert saver & {"torch", *TRAINER, *WEB_AND_SQL} == set()
    assert "ckpt.snapshot.stage" in functions
    assert functions & {"torch", "jax", "httpx"} == set()
    assert "torch" in trainer
    assert trainer & {"ckptd", *WEB_AND_SQL} == set()


def test_the_start_of_a_trainer_loads_neither_remote_file_systems_nor_what_the_saver_runs(tmp_path: Path) -> None:
    (started,) = loaded_by(f"import ckpt; ckpt.init({str(tmp_path)!r}, run='gpt')")
    assert "ckpt.snapshot.writers" in started
    assert started & {"fsspec", "ckpt.saver.pipeline", "html"} == set()
