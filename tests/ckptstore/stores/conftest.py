"""Uploads in small parts, for the tests of every service that has them."""

from __future__ import annotations

import os

import pytest

from ckptstore.stores import multipart
from ckptstore.stores.multipart import MultipartStore

MIB = 1 << 20


@pytest.fixture(scope="module")
def noise() -> bytes:
    return os.urandom(12 * MIB)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as small as S3 allows, and memory for three of them."""
    monkeypatch.setattr(multipart, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(MultipartStore, "upload_bytes", 15 * MIB)
