"""Experiment trackers, with the real packages and without a server."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
import torch
import wandb
from mlflow import MlflowClient
from safetensors.torch import load_file
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from ckpt import Checkpointer
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import ORIGIN, Heartbeat, Origin
from ckptstore.run import Run
from ckptstore.stores import open_store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    return str(tmp_path / "store")


def save(store: str, steps: int = 1) -> nn.Linear:
    model = nn.Linear(3, 2)
    with Checkpointer(store, run="gpt") as checkpointer:
        for step in range(1, steps + 1):
            model.weight.data += 1
            checkpointer.save(model, None, step)
    return model


def test_a_model_version_of_mlflow_is_a_checkpoint(store: str, tmp_path: Path) -> None:
    model = save(store)
    client = MlflowClient()
    client.create_registered_model("gpt")
    version = client.create_model_version("gpt", source="ckptd://gpt@1")
    assert client.get_model_version_download_uri("gpt", version.version) == "ckptd://gpt@1"
    folder = Path(
        mlflow.artifacts.download_artifacts(artifact_uri=f"models:/gpt/{version.version}", dst_path=str(tmp_path))
    )
    assert [path.name for path in folder.rglob("*.safetensors")] == ["model.safetensors"]
    assert torch.equal(load_file(next(folder.rglob("model.safetensors")))["weight"], model.weight)
    with pytest.raises(InvalidRequest):
        mlflow.store.artifact.artifact_repository_registry.get_artifact_repository("ckptd://gpt@1").log_artifact("x")


def test_a_reference_artifact_of_wandb_names_a_checkpoint(store: str) -> None:
    save(store)
    with wandb.init(project="p") as run:
        artifact = wandb.Artifact("gpt", type="model")
        artifact.add_reference("ckptd://gpt@1", name="checkpoint", checksum=False)
        run.log_artifact(artifact, aliases=["latest"])
    (entry,) = artifact.manifest.entries.values()
    assert (entry.ref, entry.size or 0) == ("ckptd://gpt@1", 0)


def test_the_runs_of_trackers_are_in_the_heartbeat(store: str, tmp_path: Path) -> None:
    board = SummaryWriter(str(tmp_path / "board"))
    with wandb.init(project="p") as logged, mlflow.start_run() as run:
        save(store)
        of_wandb = logged.dir
    board.close()
    gpt = Run(open_store(store), "gpt")
    (key,) = [info.key for info in gpt.store.list(gpt.keys.heartbeats)]
    origin = gpt.read(key, Heartbeat).extension(ORIGIN, Origin)
    assert origin is not None
    assert origin.trackers == {
        "W&B": of_wandb,
        "MLflow": f"sqlite:///{tmp_path}/mlflow.db/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}",
        "TensorBoard": str(tmp_path / "board"),
    }
