"""Azure Blob Storage for tests: Azurite, a program of the npm package azurite."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from tests.support.ports import free_port
from tests.support.seaweed import BUCKET, kept, wait_until_ready

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those that every Azurite has."""


def binary() -> str | None:
    """The `azurite-blob` program beside this Python or on the PATH."""
    return shutil.which("azurite-blob", path=os.path.dirname(sys.executable)) or shutil.which("azurite-blob")


def connection(endpoint: str) -> str:
    """What adlfs needs to reach the service, or a proxy in front of it."""
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}/{ACCOUNT};"


@contextmanager
def running_service(folder: Path, in_memory: bool = True) -> Iterator[str]:
    """A service with one empty container, in memory or in the folder; yields its URL. Killed on exit."""
    program, port = binary(), free_port()
    assert program is not None, "no azurite-blob program: npm install -g azurite"
    where = ["--inMemoryPersistence"] if in_memory else ["--location", str(folder)]
    arguments = ["--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    with kept([program, "--blobPort", str(port), *where, *arguments], folder, os.environ):
        wait_until_ready("azurite", f"127.0.0.1:{port}", "/", http.client.BAD_REQUEST, folder / "log")
        url = f"http://127.0.0.1:{port}"
        fsspec.filesystem("abfs", connection_string=connection(url)).mkdir(BUCKET)  # type: ignore[no-untyped-call]
        yield url
