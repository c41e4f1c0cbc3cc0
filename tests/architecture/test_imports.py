"""What a fresh interpreter loads: the linter sees import statements, this sees what they lead to."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import ckptd
import ckptplan
import ckptstore

WEB_AND_SQL = {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic"}
CKPTSTORE = sorted(module.name for module in pkgutil.walk_packages(ckptstore.__path__, "ckptstore."))
CKPTPLAN = sorted(module.name for module in pkgutil.walk_packages(ckptplan.__path__, "ckptplan."))
CKPTD = sorted(
    module.name
    for module in pkgutil.walk_packages(ckptd.__path__, "ckptd.")
    if not module.name.endswith("__main__") and ".migrations." not in module.name
)


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a new interpreter has after the statement."""
    script = f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return set(json.loads(done.stdout))


def test_the_shared_format_loads_neither_torch_nor_a_web_framework_nor_sql() -> None:
    loaded = loaded_by(f"import {', '.join(CKPTSTORE)}")
    assert "ckptstore.format.documents" in loaded
    assert loaded & {"torch", "ckpt", "ckptd", *WEB_AND_SQL} == set()


def test_a_plan_loads_no_torch() -> None:
    loaded = loaded_by(f"import {', '.join(CKPTPLAN)}; import ckpt; ckpt.plan")
    assert "ckptplan.plan" in loaded
    assert loaded & {"torch", "ckpt.checkpointer", "ckptd", *WEB_AND_SQL} == set()


def test_the_daemon_loads_no_torch() -> None:
    loaded = loaded_by(f"import {', '.join(CKPTD)}")
    assert "ckptd.app" in loaded
    assert loaded & {"torch", "ckpt"} == set()


def test_serving_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import ckptd.commands")


def test_importing_the_training_library_loads_nothing() -> None:
    assert loaded_by("import ckpt") & {"torch", "numpy", "ckptstore", *WEB_AND_SQL} == set()


def test_the_saver_process_is_light() -> None:
    loaded = loaded_by("import ckpt.saver.process")
    assert "ckptstore.commits.commit" in loaded
    trainer = {"ckpt.capture", "ckpt.snapshot", "ckpt.restoring", "ckpt.ranks", "ckpt.checkpointer"}
    assert loaded & {"torch", *trainer, *WEB_AND_SQL} == set()


def test_a_trainer_loads_no_web_framework_and_no_sql() -> None:
    """Nor are its functions hidden by modules of their names."""
    named = "assert callable(ckpt.save); assert callable(ckpt.restore)"
    loaded = loaded_by(f"import ckpt, ckpt.snapshot.overlap, ckpt.restoring.objects; ckpt.Checkpointer; {named}")
    assert "torch" in loaded
    assert loaded & {"ckptd", *WEB_AND_SQL} == set()


def test_the_public_functions_load_no_torch() -> None:
    loaded = loaded_by("import ckpt; ckpt.Checkpointer, ckpt.save_async, ckpt.restore, ckpt.load, ckpt.every")
    assert "ckpt.snapshot.stage" in loaded
    assert loaded & {"torch", "jax", "httpx"} == set()
