from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import running_daemon


def test_models_of_transformers_are_read_through_the_hub_interface(tmp_path: Path) -> None:
    """GPT-2, a Llama with tied weights, and a mixture of experts whose newest checkpoint has NaN."""
    store = f"file://{tmp_path}/store"
    with running_daemon(store) as daemon:
        program = [sys.executable, "-m", "tests.ckpt.integrations.read_hub", store, str(tmp_path)]
        client = {"HF_ENDPOINT": f"{daemon.url}/hf", "HF_TOKEN": "any", "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(program, env={**os.environ, **client}, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["as saved 3"], done.stdout + done.stderr
