"""MLflow reads checkpoints: ckptd://RUN@STEP is the source of a model version. Nothing is copied into MLflow.

    MlflowClient().create_model_version("gpt", source="ckptd://gpt@1000")

A download verifies every byte. The store or daemon is that of `CheckpointFiles`.
"""

from __future__ import annotations

from typing import Any

from mlflow.entities import FileInfo
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from ckptapi.filesystem import CheckpointFiles
from ckptstore.errors import InvalidRequest


class CheckpointArtifacts(ArtifactRepository):  # type: ignore[misc]
    """The weights and assets of a checkpoint as artifacts. MLflow makes it for the scheme ckptd. For any thread."""

    def __init__(self, artifact_uri: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(artifact_uri, *args, **kwargs)
        self._files = CheckpointFiles()
        self._root = artifact_uri.removeprefix("ckptd://").strip("/") + "/"

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """The files, also those in folders; none for the path of a file. Raises FileNotFoundError."""
        found = self._files.ls(self._root + (path or ""))
        names = {info["name"].removeprefix(self._root): info["size"] for info in found}
        return [FileInfo(name, False, size) for name, size in names.items() if name != path]

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        self._files.get_file(self._root + remote_file_path, local_path)

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Raises InvalidRequest: a checkpoint does not change."""
        raise InvalidRequest(f"{self.artifact_uri} is a checkpoint, which does not change", "Pass assets= to its save")

    log_artifacts = log_artifact
