"""Opening a source by its URL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptapi.client import DaemonClient
from ckptapi.opening import open_source
from ckptstore.errors import InvalidRequest
from ckptstore.reading.source import StoreSource


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://ckptd.example:8443"])
def test_an_http_url_is_a_daemon(url: str) -> None:
    source = open_source(url, token="secret")
    try:
        assert isinstance(source, DaemonClient)
        assert source.url == url
        assert "secret" not in repr(source)
    finally:
        source.close()


def test_any_other_url_is_a_store(tmp_path: Path) -> None:
    for url in (str(tmp_path), tmp_path.as_uri(), "memory://opening"):
        source = open_source(url)
        assert isinstance(source, StoreSource)
        assert source.runs() == []


def test_a_scheme_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nosuch"):
        open_source("nosuch://bucket/prefix")


def test_a_store_is_opened_without_the_http_client(tmp_path: Path) -> None:
    code = f"import sys, ckptapi.opening as o; o.open_source({str(tmp_path)!r}); print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
