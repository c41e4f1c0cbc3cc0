from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt import Checkpointer
from ckpt.config import Config
from ckpt.saver.retained_snapshot import RETAIN_SNAPSHOT_S
from ckptstore.errors import BadInput, InvalidRequest


@pytest.mark.parametrize("run", ["../x", "", "a//b", "a..b", ".hidden", "x" * 200, "a b"])
def test_bad_run_name(run: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        Checkpointer(str(tmp_path), run=run)
    assert caught.value.code in ("invalid_name", "invalid_request")
    assert caught.value.hint


def test_unknown_scheme_names_the_url_and_the_package() -> None:
    with pytest.raises(InvalidRequest, match="gopher://x") as caught:
        Checkpointer("gopher://x", run="r")
    assert "install" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"compres": "off"}, "'compres' is not a setting. Did you mean 'compress'?"),
        ({"wxyz": 3}, "'wxyz' is not a setting. There are store, run, local"),
    ],
)
def test_a_misspelt_setting(tmp_path: Path, options: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Checkpointer(str(tmp_path), run="r", **options)
    assert str(caught.value).startswith(hint)


def test_neither_store_nor_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPT_STORE", "CKPTD_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidRequest, match="no store"):
        Checkpointer(run="r")


def test_retain_snapshot_s_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_RETAIN_SNAPSHOT_S")
    assert Config("/store", run="r").retain_snapshot_s == RETAIN_SNAPSHOT_S
    monkeypatch.setenv("CKPT_RETAIN_SNAPSHOT_S", "")
    assert Config("/store", run="r").retain_snapshot_s == RETAIN_SNAPSHOT_S
    monkeypatch.setenv("CKPT_RETAIN_SNAPSHOT_S", "7")
    assert Config("/store", run="r").retain_snapshot_s == 7
    assert Config("/store", run="r", retain_snapshot_s=0).retain_snapshot_s == 0
    monkeypatch.setenv("CKPT_RETAIN_SNAPSHOT_S", "soon")
    with pytest.raises(InvalidRequest, match="retain_snapshot_s must be at least 0, not soon"):
        Config("/store", run="r")
    with pytest.raises(InvalidRequest, match="retain_snapshot_s must be at least 0, not -1"):
        Config("/store", run="r", retain_snapshot_s=-1)
