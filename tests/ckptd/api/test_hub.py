"""The clients of the Hugging Face Hub on a daemon. Whole models are in tests/ckpt/integrations/test_hub.py."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import safe_open
from safetensors.numpy import load

from ckptapi.bodies import Scope, TokenRequest
from ckptd.services.contents import HOLD_S
from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import POLICIES
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.commit import commit_attempt
from ckptstore.commits.labels import LabelChange
from ckptstore.commits.leases import active_leases
from ckptstore.errors import CheckpointHeld
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.pruning import Prune
from ckptstore.retention.scrubbing import due_for_scrub, scrub
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.checks import MAX_SKEW_S
from tests.conftest import S3Location
from tests.support.checkpoints import Arrays, flip, steps, write_checkpoint, write_rank
from tests.support.command_line import succeed
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import MovableClock
from tests.support.waiting import wait_until

RNG = np.random.default_rng(7)
ARRAYS: Arrays = {
    "model/module.emb": RNG.standard_normal((1000, 300)).astype(np.float32),
    "model/module.bias": np.arange(7, dtype=np.float16),
    "ema/emb": RNG.standard_normal((30, 7)).astype(np.float32),
    "assets/config.json": np.frombuffer(b'{"model_type": "tiny"}', np.uint8),
    "assets/chat/a.jinja": np.frombuffer(b"hello", np.uint8),
}
ONLY = "model.safetensors"
FILES = {ONLY, "config.json", "chat/a.jinja"}
LONG = "team/sweep/lr=0.1"
LONG_NAME = "runs/team_x2F_sweep_x2F_lr_x3D_0.1"
SECRET = "correct horse battery staple"


def hub(daemon: Daemon, token: str = "any") -> HfApi:
    return HfApi(f"{daemon.url}/hf", token)


def file_system(daemon: Daemon) -> Any:
    return HfFileSystem(endpoint=f"{daemon.url}/hf", token="any", skip_instance_cache=True)


def sha(checkpoint: Checkpoint) -> str:
    return checkpoint.id.partition("@")[2]


@dataclass(frozen=True, slots=True)
class Named:
    """A daemon over runs with several names, and its checkpoints of run gpt, steps 10 to 40."""

    daemon: Daemon
    checkpoints: list[Checkpoint]
    cache: Path

    @property
    def hub(self) -> HfApi:
        return hub(self.daemon)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Named]:
    """The health of the last one is not known, and the one before it is in quarantine."""
    folder = tmp_path_factory.mktemp("hub")
    store = open_store(str(folder / "store"))
    checkpoints = [write_checkpoint(store, "gpt", step, ARRAYS, statistics=step < 40) for step in (10, 20, 30, 40)]
    store.put(RunKeys("gpt").quarantine_record(checkpoints[2].attempt), b"{}")
    for run in ("team/gpt", LONG):
        write_checkpoint(store, run, 1000, ARRAYS)
    with running_daemon(store.url) as daemon:
        with daemon.client() as client:
            client.label(checkpoints[0], LabelChange({"paper": ""}))
        yield Named(daemon, checkpoints, folder / "cache")


def two_ranks(store: Store, compress: str) -> None:
    """A checkpoint whose entries two ranks have written, by turns."""
    attempt, names = Attempt(1000, new_ulid(1e9)), sorted(ARRAYS)
    receipts = [
        write_rank(
            store, "gpt", attempt, {n: ARRAYS[n] for n in names[rank::2]}, rank, 2, coding=POLICIES[compress]
        )
        for rank in (0, 1)
    ]  # fmt: skip
    commit_attempt(Run(store, "gpt"), receipts)


@pytest.mark.parametrize(("store", "compress"), [("local", "off"), ("s3", "fast")], indirect=["store"])
def test_every_client_reads_the_same_bytes(
    store: Store, compress: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    two_ranks(store, compress)
    remote: S3Location | None = request.getfixturevalue("s3_store") if store.url.startswith("s3") else None
    environment = {**os.environ, **remote.environment} if remote else None
    with running_daemon(store.url, environment=environment) as daemon:
        api, files = hub(daemon), file_system(daemon)
        folder = Path(api.snapshot_download("runs/gpt", revision="step-1000", cache_dir=tmp_path / "hub"))
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == FILES
        succeed("export", "gpt", "--to", tmp_path / "export", "--format", "huggingface", "--url", daemon.url)
        whole = (folder / ONLY).read_bytes()
        for name in FILES:
            data = (folder / name).read_bytes()
            assert data == (tmp_path / "export" / name).read_bytes() == files.cat_file(f"runs/gpt/{name}")
            assert Path(api.hf_hub_download("runs/gpt", name, cache_dir=tmp_path / "one")).read_bytes() == data
        for start in random.sample(range(len(whole)), 100):
            stop = start + random.randrange(9000)
            assert files.cat_file(f"runs/gpt@main/{ONLY}", start, stop) == whole[start:stop]
        with safe_open(folder / ONLY, "np") as opened:
            for name in ("emb", "bias"):
                assert np.array_equal(opened.get_tensor(name), ARRAYS[f"model/module.{name}"])
        assert api.get_safetensors_metadata("runs/gpt").parameter_count == {"F32": 300_000, "F16": 7}
        half = load(files.cat_file(f"runs/gpt@step-1000+fp16/{ONLY}"))
        assert np.array_equal(half["emb"], ARRAYS["model/module.emb"].astype(np.float16))


def test_revisions_are_steps_tags_and_commits_with_views(named: Named) -> None:
    by_step = {one.step: one for one in named.checkpoints}
    steps = {"main": 20, "step-40": 40, "20": 20, "paper": 10, "latest": 40, sha(by_step[40]): 40, by_step[10].id: 10}
    files = file_system(named.daemon)
    for revision, step in steps.items():
        for view in ("", "+bf16", "+ema", "+ema+fp16"):
            found = named.hub.model_info("runs/gpt", revision=revision + view)
            assert found.sha == sha(by_step[step]) + view
            again = named.hub.get_hf_file_metadata(url=f"{named.daemon.url}/hf/runs/gpt/resolve/{found.sha}/{ONLY}")
            assert again.commit_hash == found.sha
            assert files.info(f"runs/gpt@{revision}{view}/{ONLY}")["size"] == again.size
    listed = named.hub.list_repo_refs("runs/gpt")
    assert {ref.name: ref.target_commit for ref in listed.tags} == {"paper": sha(by_step[10])}
    assert [ref.name for ref in listed.branches] == ["step-40", "step-20", "step-10"]
    etags = {
        named.hub.get_hf_file_metadata(url=f"{named.daemon.url}/hf/runs/gpt/resolve/step-10{view}/{ONLY}").etag
        for view in ("", "+bf16", "+fp16", "+ema")
    }
    assert len(etags) == 4


def test_a_scan_finds_every_run(tmp_path: Path) -> None:
    runs, store = ["a--b", "gpt", LONG, "odd_x2F_", "team/gpt", "v1.-2-"], open_store(str(tmp_path / "store"))
    for run in runs:
        write_checkpoint(store, run, 1, ARRAYS)
    with running_daemon(store.url) as daemon:
        api = hub(daemon)
        found = [model.id for model in api.list_models(author="runs")]
        assert found == [model.id for model in api.list_models()]
        assert {"runs/gpt", "runs/team_x2F_gpt", LONG_NAME} < set(found)
        for name in found:
            assert api.model_info(name).sha
        assert len(found) == len(runs)
        assert [model.id for model in api.list_models(search="team", limit=1)] == ["runs/team_x2F_gpt"]
        assert list(api.list_models(author="google")) == []


def test_repositories_of_runs_with_slashes_and_folders_of_assets(named: Named) -> None:
    files = file_system(named.daemon)
    for repository in ("team/gpt", "runs/team_x2F_gpt", LONG_NAME):
        assert named.hub.model_info(repository, revision="step-1000").id == repository
        assert sorted(files.ls(repository, detail=False)) == [
            f"{repository}/{n}" for n in ("chat", "config.json", ONLY)
        ]
        assert files.find(repository) == sorted(f"{repository}/{name}" for name in FILES)
        assert files.isdir(f"{repository}/chat")
        assert files.cat_file(f"{repository}/chat/a.jinja") == b"hello"


@pytest.mark.parametrize(
    ("repository", "revision", "name", "error"),
    [
        ("runs/bert", "main", ONLY, RepositoryNotFoundError),
        ("bert-base-uncased", "main", ONLY, RepositoryNotFoundError),
        ("runs/gpt_x2F_", "main", ONLY, RepositoryNotFoundError),
        ("runs/gpt", "step-7", ONLY, RevisionNotFoundError),
        ("runs/gpt", "step-30", ONLY, RevisionNotFoundError),
        ("runs/gpt", "no-tag", ONLY, RevisionNotFoundError),
        ("runs/gpt", "bert@10", ONLY, RevisionNotFoundError),
        ("runs/gpt", "refs/pr/1", ONLY, RevisionNotFoundError),
        ("runs/gpt", "main+int8", ONLY, RevisionNotFoundError),
        ("runs/gpt", "main+ema+int8", ONLY, RevisionNotFoundError),
        ("runs/gpt", "main", "pytorch_model.bin", EntryNotFoundError),
    ],
)
def test_what_is_missing_raises_the_exceptions_of_the_client(
    named: Named, repository: str, revision: str, name: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        named.hub.hf_hub_download(repository, name, revision=revision, cache_dir=named.cache)
    if error is not EntryNotFoundError:
        with pytest.raises(error):
            named.hub.model_info(repository, revision=revision)
    else:
        with pytest.raises(error):
            list(named.hub.list_repo_tree(repository, "additional_chat_templates"))


def test_a_token_sees_its_runs_and_a_wrong_one_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    for run in ("gpt-a", "bert"):
        write_checkpoint(store, run, 1, ARRAYS)
    with running_daemon(store.url, environment={**os.environ, "CKPTD_TOKEN": SECRET}) as daemon:
        with daemon.client(SECRET) as client:
            request = TokenRequest(name="bound", scopes=[Scope.READ], runs=["gpt-*"])
            bound = hub(daemon, client.create_token(request).secret)
            writer = client.create_token(TokenRequest(name="writer", scopes=[Scope.WRITE])).secret
        assert bound.model_info("runs/gpt-a").sha
        assert [model.id for model in bound.list_models()] == ["runs/gpt-a"]
        for hidden in ("runs/bert", "runs/none"):  # one is there, and the answers are alike
            with pytest.raises(RepositoryNotFoundError, match=f"run '{hidden[5:]}' has no checkpoint$"):
                bound.model_info(hidden)
        for token, status in (("wrong", 401), (writer, 403)):
            with pytest.raises(HfHubHTTPError) as refused:
                hub(daemon, token).model_info("runs/gpt-a")
            assert refused.value.response.status_code == status
        assert "Invalid credentials" in daemon.get("/hf/runs/gpt-a/resolve/main/x").headers["x-error-message"]


def big(store: Store) -> Checkpoint:
    """Its file is read in several pieces."""
    return write_checkpoint(store, "gpt", 1, {"model/w": np.zeros((90 << 20) // 4, np.float32)})


def test_a_download_holds_a_lease_and_a_client_that_vanishes_frees_it(store: Store) -> None:
    checkpoint = big(store)
    write_checkpoint(store, "gpt", 2, ARRAYS)
    path, later = f"/hf/runs/gpt/resolve/step-1/{ONLY}", MovableClock(HOLD_S + MAX_SKEW_S + 60)
    with running_daemon(store.url) as daemon, daemon.client() as client:
        assert daemon.get(path, headers={"Range": "bytes=10-19"}).status_code == 206
        assert active_leases(Run(store, "gpt")) == {}
        address = urlsplit(daemon.url)
        with socket.create_connection((str(address.hostname), address.port or 0)) as reader:
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
            assert reader.recv(12) == b"HTTP/1.1 200"
        assert active_leases(Run(store, "gpt")) == {checkpoint.attempt: ["anonymous: download"]}
        with pytest.raises(CheckpointHeld, match="lease:anonymous: download"):
            client.delete(checkpoint, 60.0)
        assert active_leases(Run(store, "gpt", later)) == {}
        delete_checkpoint(Run(store, "gpt", later), checkpoint.attempt, "test", 60.0)
        wait_until(lambda: daemon.get(path).status_code == 404, "the daemon to see it")
        assert daemon.get(path).headers["x-error-code"] == "RevisionNotFound"


def test_a_prune_between_two_files_does_not_end_a_download(store: Store, tmp_path: Path) -> None:
    old = write_checkpoint(store, "gpt", 1, ARRAYS)
    with running_daemon(store.url) as daemon, daemon.client() as client:
        api = hub(daemon)
        at = api.model_info("runs/gpt").sha
        first = Path(api.hf_hub_download("runs/gpt", "config.json", revision=at, cache_dir=tmp_path))
        write_checkpoint(store, "gpt", 2, ARRAYS)
        client.prune(Prune(Policy(keep_last=1), "gpt"))
        assert steps(store) == [2, 1]
        folder = Path(api.snapshot_download("runs/gpt", revision=at, cache_dir=tmp_path))
        assert all((folder / name).is_file() for name in FILES)
        assert (folder / "config.json").samefile(first)
        assert active_leases(Run(store, "gpt")) == {old.attempt: ["anonymous: download"]}, "one for all files"


def test_a_damaged_byte_is_never_served(store: Store, tmp_path: Path) -> None:
    checkpoint = big(store)
    shard = tmp_path / "store" / RunKeys("gpt").shard(checkpoint.attempt, "shard-00000.ckpt")
    flip(shard, shard.stat().st_size - 9)
    path = f"/hf/runs/gpt/resolve/step-1/{ONLY}"
    with running_daemon(store.url) as daemon:
        received = list[bytes]()
        with httpx.stream("GET", daemon.url + path) as response, pytest.raises(httpx.RemoteProtocolError):
            received.extend(response.iter_bytes())
        assert 0 < sum(map(len, received)) < 90 << 20
        part = daemon.get(path, headers={"Range": "bytes=-100"})
        assert (part.status_code, part.json()["code"]) == (500, "corrupt")


def test_healed_bytes_are_served(store: Store, tmp_path: Path) -> None:
    victim, _ = [write_checkpoint(store, "gpt", step, ARRAYS) for step in (1, 2)]
    path = f"/hf/runs/gpt/resolve/step-1/{ONLY}"
    with running_daemon(store.url) as daemon:
        intact = daemon.get(path).content
        flip(tmp_path / "store" / RunKeys("gpt").shard(victim.attempt, "shard-00000.ckpt"))
        assert daemon.get(path).json()["code"] == "corrupt"
        assert not any(found.ok for found in scrub(store, [victim], "me", system_clock))
        wait_until(lambda: daemon.get(path).status_code == 404, "the quarantine")
        due = due_for_scrub([Run(store, "gpt")], damaged=True)
        assert [found.ok for found in scrub(store, due, "me", system_clock, heal_from=[])] == [True, True]
        wait_until(lambda: daemon.get(path).status_code == 200, "the end of the quarantine")
        assert daemon.get(path).content == intact
