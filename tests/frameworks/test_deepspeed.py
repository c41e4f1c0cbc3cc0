"""DeepSpeed's ZeRO: killed runs resume exactly, and states go from each stage into each layout, bit for bit."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ckpt import Checkpointer
from tests.ckpt.integrations.proof import Integration, operators_can_use
from tests.frameworks.zero import Plain, differences, whole
from tests.support.command_line import invoke, succeed
from tests.support.forking import fork

IMPORTS = ("tests.frameworks.zero", "ckpt.integrations.deepspeed", "tests.ckpt.integrations.proof", "torch._dynamo")
DEEPSPEED = Integration("tests.frameworks.train_deepspeed", IMPORTS)
STAGES = ("zero1", "zero2", "zero3")
END_S = 900.0


def run(folder: Path, ranks: int, module: str, *arguments: str) -> list[list[str]]:
    """The lines of each rank of a program."""
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    texts = [log.with_suffix(f".{rank}") for rank in range(ranks)]
    forks = []
    for rank, path in enumerate(texts):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MEETING": str(log.with_suffix(".meeting"))}
        with path.open("wb") as file:
            out = file.fileno()
            forks.append(fork(IMPORTS, module, arguments, stdout=out, stderr=out, environment={**os.environ, **own}))
    try:
        codes = [one.wait(END_S) for one in forks]
    finally:
        for one in forks:
            one.kill()
            one.wait()
    assert codes == [0] * ranks, "\n".join(path.read_text() for path in texts)
    return [path.read_text().splitlines() for path in texts]


def compared(folder: Path, ranks: int, part: int) -> dict[tuple[str, str], list[str]]:
    """What one round of the matrix found, the same on all ranks: by both layouts."""
    outputs = run(folder, ranks, "tests.frameworks.zero_matrix", str(folder), str(part), "bf16")
    words = [[line.split()[1:] for line in lines if line.startswith("compared ")] for lines in outputs]
    found = [{(source, target): rest for source, target, *rest in each} for each in words]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks have trained and saved in each layout."""
    folder = tmp_path_factory.mktemp("zero")
    run(folder, 2, "tests.frameworks.zero_matrix", str(folder), "0", "bf16")
    return folder


def test_each_layout_restores_into_each_also_through_one_rank(saved: Path) -> None:
    """Parameters, masters, moments and steps, bit for bit; a model that was built anew differs in most of them."""
    sources = (*STAGES, "fsdp2")
    for ranks, part, targets in ((2, 1, (*STAGES, "fsdp2")), (1, 1, (*STAGES, "fsdp2", "plain")), (2, 2, sources)):
        found = compared(saved, ranks, part)
        assert found.keys() == {(source, target) for source in sources for target in targets}
        assert all(int(before) > 20 and after == "equal" for before, after in found.values()), found


def test_exports_are_what_deepspeed_consolidates(saved: Path) -> None:
    (saved / "exports").mkdir()
    for stage in STAGES:
        file = saved / "exports" / f"{stage}.pt"
        succeed("export", stage, "--to", file, "--names", "model/*", "--store", saved / "store")
        exported = torch.load(file)["model"]
        own = get_fp32_state_dict_from_zero_checkpoint(str(saved / "own" / stage))
        assert exported.keys() >= own.keys()  # of ZeRO 1 it leaves out what is not trained
        assert all(torch.equal(exported[name].float(), one) for name, one in own.items())  # it widens what is bfloat16


@pytest.mark.parametrize("stage", STAGES)
def test_its_own_checkpoints_are_imported(saved: Path, tmp_path: Path, stage: str) -> None:
    """Parameters, moments and steps, bit for bit; also of a universal checkpoint. A model and an optimizer restore."""
    expected = torch.load(saved / f"{stage}.pt")
    universal = tmp_path / "universal"
    convert(Namespace(
        input_folder=str(saved / "own" / stage / "three"), output_folder=str(universal), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    ))  # fmt: skip
    for run, folder in (("own", saved / "own" / stage), ("universal", universal)):
        succeed("import", folder, f"{run}@3", "--store", tmp_path / "store")
        plain = Plain(sharded=False)
        with Checkpointer(str(tmp_path / "store"), run=run) as checkpointer:
            restored = checkpointer.restore(plain.module, plain.optim, trainer=None, cast=True)
            assert restored is not None
            assert restored.values["trainer"]["global_steps"] == 3
        assert differences(whole(plain), expected) == []


def test_damaged_and_parallel_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saved / "own/zero2/three", folder)
    model = next(folder.glob("*model_states.pt"))
    model.rename(model.with_name("mp_rank_01_model_states.pt"))
    refused = invoke("import", folder, "gpt@3", "--store", tmp_path / "store")
    assert "of tensor or pipeline parallelism" in refused.stderr
    (folder / "mp_rank_01_model_states.pt").rename(model)
    next(folder.glob("*rank_1_*optim_states.pt")).unlink()
    refused = invoke("import", folder, "gpt@3", "--store", tmp_path / "store")
    assert "has not the files of all" in refused.stderr
    assert refused.code


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks"),
    [("zero1", "fp32", 1), ("zero1", "bf16", 2), ("zero2", "fp16", 2), ("zero3", "fp32", 2), ("zero3", "bf16", 1)],
)
def test_a_run_killed_within_an_accumulation_window(tmp_path: Path, stage: str, dtype: str, ranks: int) -> None:
    """40 or 20 micro-batches of two epochs, saved after each fourth."""
    DEEPSPEED.resumes_exactly(tmp_path, "gpt", 14, stage, dtype, resumed_at=12, ranks=ranks)
    operators_can_use(tmp_path, "gpt", tmp_path / "gpt-0.pt")


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    (lines,) = run(tmp_path, 1, "tests.frameworks.zero_refused", str(tmp_path))
    said = [line.removeprefix("refused ") for line in lines if line.startswith("refused ")]
    kinds = (
        "AdamW in place of ZeRO 1, 2 or 3", "AdamW in place of ZeRO 1, 2 or 3", "a pipeline engine",
        "tensor parallelism", "experts (MoE)", "ZeRO++ (hpZ)", "ZeRO++ (quantization)", "offload to NVMe",
    )  # fmt: skip
    assert said[:-1] == [f"unsupported_object the engine uses {kind}, which is not supported" for kind in kinds]
    assert said[-1].startswith("invalid_request 2 of 3 micro-batches")
