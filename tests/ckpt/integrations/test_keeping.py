"""A Keeper: limits are applied when a save is durable, in steps that the guard of prunes allows; errors are logged.

And the files of a model, as an export of it has them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.integrations.keeping import Keeper, add_assets
from ckptstore.format.records import Policy
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store
from ckptstore.stores.base import ObjectInfo, WrappedStore
from tests.support.command_line import succeed
from tests.support.forking import run

MODEL = torch.nn.Linear(1, 1)


def save(checkpointer: Checkpointer, keeper: Keeper, step: int) -> list[int]:
    """The steps that are left when the keeper has seen to this save."""
    keeper.saved(checkpointer.save_async(MODEL, None, step))
    keeper._thread.submit(lambda: None).result()
    return sorted(one.step for one in StoreOperator(open_store(checkpointer.config.source)).checkpoints("gpt"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the keeper: a loader of another test may still live, and be reported."""
    return [one for one in caplog.records if one.levelno >= logging.WARNING and one.name == "ckpt.integrations.keeping"]


def test_a_limit_on_a_long_run_takes_effect_within_few_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), run="gpt", writer="thread", max_references=0) as checkpointer:
        for step in range(30):
            checkpointer.save(MODEL, None, step)
        keeper = Keeper(checkpointer.config, Policy(keep_last=1))
        left = [save(checkpointer, keeper, step) for step in (30, 31, 32)]
        keeper.close()
    assert left == [[27, 28, 29, 30], [31], [32]]
    assert [record.message for record in warnings(caplog)] == [
        "run gpt has 31 checkpoints, and 1 are to be kept: 27 are deleted now, and more with the next saves"
    ]


class Failing(WrappedStore):
    """A store whose listings fail once, with an error that is none of ours."""

    failed = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the library of the store is broken")
        return super().list(prefix)


def test_a_foreign_error_is_logged_and_the_next_save_prunes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), run="gpt", writer="thread", max_references=0) as checkpointer:
        keeper = Keeper(checkpointer.config, Policy(keep_last=1))
        save(checkpointer, keeper, 1)
        keeper._operator = StoreOperator(Failing(open_store(str(tmp_path))))
        assert (save(checkpointer, keeper, 2), save(checkpointer, keeper, 3)) == ([1, 2], [3])
        keeper.close()
    [record] = warnings(caplog)
    assert record.message == "run gpt is not pruned"
    assert record.exc_text is not None
    assert "the library of the store is broken" in record.exc_text


HUB = (
    "transformers.trainer", "lightning.pytorch", "accelerate", "ckpt.integrations.transformers",
    "ckpt.integrations.lightning", "ckpt.integrations.accelerate", "torch._dynamo",
)  # fmt: skip
WORDS = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(("framework", "files"), [("transformers", WORDS), ("lightning", WORDS), ("accelerate", [])])
def test_an_export_is_a_folder_that_transformers_loads(tmp_path: Path, framework: str, files: list[str]) -> None:
    """Also after a resume, of a model inside another module, and with the tokenizer that the framework was given."""
    code, said, errors = run(HUB, "tests.ckpt.integrations.hub_folder", [str(tmp_path), framework])
    assert code == 0, errors
    succeed("export", "gpt", "--to", tmp_path / "hub", "--format", "huggingface", "--store", tmp_path)
    found = sorted(one.name for one in (tmp_path / "hub").iterdir())
    assert found == sorted(["config.json", "generation_config.json", "model.safetensors", *files])
    code, loaded, errors = run(HUB, "tests.ckpt.integrations.hub_folder", [str(tmp_path), "load"])
    assert code == 0, errors
    expected = {**json.loads(said.splitlines()[-1]), "architectures": ["GPT2LMHeadModel"]}
    if files:
        expected |= {"ids": [1, 2, 3, 1], "chat": "{{ messages }}"}
    assert json.loads(loaded.splitlines()[-1]) == expected


class Config:
    """What a model of transformers has."""

    dtype = None

    def to_diff_dict(self) -> dict[str, Any]:
        return vars(self)

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(self.to_diff_dict(), default=str))


class Broken:
    def save_pretrained(self, folder: str) -> None:
        raise OSError("no space left on device")


def test_files_that_cannot_be_written_do_not_end_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = torch.nn.Linear(1, 1)
    model.config = Config()
    with Checkpointer(str(tmp_path), run="gpt", writer="thread") as checkpointer:
        add_assets(checkpointer, torch.nn.Linear(1, 1), None)
        assert checkpointer._assets is None
        add_assets(checkpointer, model, Broken())
        assert checkpointer._assets == {"config.json": b'{"architectures": ["Linear"], "dtype": null}'}
        add_assets(checkpointer, model, Config())  # it has them
        assert checkpointer._assets is not None
    assert [record.message for record in warnings(caplog)] == ["checkpoints are saved without the files of a Broken"]


def test_weights_of_adapters_come_without_a_configuration_that_does_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT is not among the packages of these tests; tests/frameworks has it."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].config, model.peft_config = Config(), {}
    with Checkpointer(str(tmp_path), run="gpt", writer="thread") as checkpointer:
        add_assets(checkpointer, model)
        assert checkpointer._assets is None
    assert [one.message for one in warnings(caplog)] == ["checkpoints are saved without the files of the adapters"]
