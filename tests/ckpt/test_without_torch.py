"""Values of numpy, saved and restored in interpreters that have no torch; and what each world reads of the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import ckpt
from ckpt import Checkpointer
from tests.support.command_line import invoke
from tests.support.waiting import present

WITHOUT = "import sys; sys.modules['torch'] = None\n"  # every import of it fails


class Pair(NamedTuple):
    first: np.ndarray
    second: np.ndarray


def run(script: str, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-c", WITHOUT + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout


TRAIN = """
import os, signal, sys
import numpy as np
import ckpt

store, kill_at = sys.argv[1], int(sys.argv[2])
weights, velocity = np.ones((300, 70), np.float32), np.zeros((300, 70), np.float32)
checkpointer = ckpt.init(store, run="numpy")
template = {"weights": weights, "velocity": velocity}
if (restored := ckpt.restore(shared={"state": template}, place=None)) is not None:
    weights, velocity = restored.values["state"]["weights"], restored.values["state"]["velocity"]
    assert restored.values["place"]["step"] == restored.step
for step in range(restored.step + 1 if restored else 0, 12):
    velocity *= np.float32(0.9)
    velocity += np.random.standard_normal(velocity.shape).astype(np.float32)
    weights -= np.float32(0.01) * velocity
    handle = ckpt.save_async(
        None, None, step, shared={"state": {"weights": weights, "velocity": velocity}}, place={"step": step}
    )
    if step == kill_at:
        handle.result(60)
        os.kill(os.getpid(), signal.SIGKILL)
    print(step, float(np.float64(weights.sum())).hex(), flush=True)
ckpt.close()
print(sys.modules["torch"])
"""


def test_a_killed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = run("import numpy; numpy.random.seed(5)" + TRAIN, str(tmp_path / "a"), "-1")
    killed = run("import numpy; numpy.random.seed(5)" + TRAIN, str(tmp_path / "b"), "6", code=-9)
    rest = run("import numpy; numpy.random.seed(99)" + TRAIN, str(tmp_path / "b"), "-1")
    lines = whole.splitlines()
    assert (killed.splitlines(), rest.splitlines(), lines[-1]) == (lines[:6], lines[7:], "None")


def test_arrays_of_an_interpreter_without_torch_are_tensors_and_arrays_here(tmp_path: Path) -> None:
    run(
        "import numpy as np, ckpt, sys\n"
        "with ckpt.Checkpointer(sys.argv[1], run='r', writer='thread') as one:\n"
        "    state = {'w': np.arange(30000.), 'b': np.arange(3)}\n"
        "    one.save(None, None, 1, shared={'state': state}, mine=np.ones(9000))",
        str(tmp_path),
    )
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        found, restored = checkpointer.load(), present(checkpointer.restore())
    assert torch.equal(found["state/w"], torch.arange(30000.0, dtype=torch.float64))
    assert found.keys() == {"state/w", "state/b", "rank-00000/mine"}
    assert np.array_equal(restored.values["state"]["b"], np.arange(3))
    assert invoke("verify", "r@1", "--store", tmp_path).code == 0


def test_tensors_are_arrays_in_an_interpreter_without_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 100)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        pair = Pair(np.arange(4), np.ones((2, 2)))
        shared = {"pair": pair, "kinds": {"size": torch.Size([2]), "dtype": torch.float16, "t": torch.arange(5)}}
        checkpointer.save(model, None, 1, shared=shared)
    script = (
        "import ckpt, sys\n"
        "with ckpt.Checkpointer(sys.argv[1], run='r', writer='thread') as one:\n"
        "    found, values = one.load(names='model/*'), one.restore().values\n"
        "print(found['model/weight'].astype('float64').sum().hex(), values['model']['bias'].dtype)\n"
        "print(values['kinds'], values['pair'].first)"
    )
    weight, kinds = run(script, str(tmp_path)).splitlines()
    assert weight == f"{model.weight.detach().numpy().astype('float64').sum().hex()} float32"
    assert kinds == "{'size': (2,), 'dtype': 'float16', 't': array([0, 1, 2, 3, 4])} [0 1 2 3]"


def test_a_state_without_memory_for_a_copy(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "os.environ['LOCAL_WORLD_SIZE'] = '1000000000'\n"
        "import numpy as np, ckpt, sys\n"
        "big = np.random.standard_normal(6_000_000)\n"
        "state = {'big': big, 'turned': np.arange(9.).reshape(3, 3).T, 's': np.ones(1)}\n"
        "with ckpt.Checkpointer(sys.argv[1], run='r') as one:\n"
        "    print(one.save_async(None, None, 1, shared=state).staged(), one.saver_pid)\n"
        "    found = one.restore(shared=dict.fromkeys(state)).values\n"
        "print(all(np.array_equal(found[name], state[name]) for name in state))"
    )
    assert run(script, str(tmp_path)).split() == ["True", "None", "True"]


def test_a_model_without_torch_is_refused_by_name_and_the_public_names_are_there(tmp_path: Path) -> None:
    script = (
        "import numpy as np, ckpt, sys\n"
        "print(all(hasattr(ckpt, name) for name in ckpt.__all__ if name != 'data'))\n"
        "try:\n"
        "    ckpt.Checkpointer(sys.argv[1], run='r').save(np.ones(3), None, 1)\n"
        "except ckpt.CkptError as error:\n"
        "    print(error.code, error)"
    )
    names, said = run(script, str(tmp_path)).split("\n", 1)
    assert (names, said.startswith("invalid_request model is a "), "shared={...}" in said) == ("True", True, True)
    assert ckpt.data is not None
