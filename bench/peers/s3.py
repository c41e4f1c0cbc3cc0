"""Peers on a bucket: torch and DCP over s3torchconnector, torch over s3fs; and obstore with bare bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import fsspec
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.measuring import problem
from bench.peers.peer import give_back
from bench.state import State

PART_BYTES = 16 << 20
CONCURRENCY = 4
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where it is, and how to get in."""

    endpoint: str
    name: str
    access_key: str
    secret_key: str


class S3Peer(Protocol):
    """One way to keep states in a bucket."""

    def save(self, state: State, key: str) -> None:
        """Durable on return."""
        ...

    def load(self, key: str, state: State) -> None:
        """Give the live tensors the saved values."""
        ...


class S3TorchConnector:
    """torch.save and torch.load over streams. The keys go by the environment."""

    def __init__(self, bucket: Bucket) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        os.environ |= {"AWS_ACCESS_KEY_ID": bucket.access_key, "AWS_SECRET_ACCESS_KEY": bucket.secret_key}
        self.bucket = bucket
        self.files = S3Checkpoint(REGION, bucket.endpoint, S3ClientConfig(part_size=PART_BYTES, force_path_style=True))

    def save(self, state: State, key: str) -> None:
        """One object."""
        with self.files.writer(f"s3://{self.bucket.name}/{key}") as writer:
            torch.save(state.tree(), writer)

    def load(self, key: str, state: State) -> None:
        """Read whole."""
        with self.files.reader(f"s3://{self.bucket.name}/{key}") as reader:
            give_back(torch.load(reader, weights_only=True), state)


class S3Dcp:
    """DCP with s3torchconnector's storage; it learns of another service from the environment only."""

    def __init__(self, bucket: Bucket) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        os.environ |= {
            "AWS_ACCESS_KEY_ID": bucket.access_key,
            "AWS_SECRET_ACCESS_KEY": bucket.secret_key,
            "AWS_ENDPOINT_URL": bucket.endpoint,
        }
        self.bucket = bucket
        self.config = S3ClientConfig(part_size=PART_BYTES, force_path_style=True)
        self.writer, self.reader = S3StorageWriter, S3StorageReader

    def save(self, state: State, key: str) -> None:
        """A folder of two files."""
        url = f"s3://{self.bucket.name}/{key}"
        writer = self.writer(REGION, url, s3client_config=self.config, thread_count=2)
        dcp_save(state.tensors(), storage_writer=writer, no_dist=True)

    def load(self, key: str, state: State) -> None:
        """In place."""
        reader = self.reader(REGION, f"s3://{self.bucket.name}/{key}", s3client_config=self.config)
        dcp_load(state.tensors(), storage_reader=reader, no_dist=True)


class TorchOverS3fs:
    """torch.save and torch.load with files of fsspec."""

    def __init__(self, bucket: Bucket) -> None:
        options = {"endpoint_url": bucket.endpoint, "key": bucket.access_key, "secret": bucket.secret_key}
        self.bucket = bucket
        self.files: Any = fsspec.filesystem("s3", **options)  # type: ignore[no-untyped-call]

    def save(self, state: State, key: str) -> None:
        """One object."""
        with self.files.open(f"{self.bucket.name}/{key}", "wb") as file:
            torch.save(state.tree(), file)

    def load(self, key: str, state: State) -> None:
        """Read ahead, as s3fs does it."""
        with self.files.open(f"{self.bucket.name}/{key}", "rb") as file:
            give_back(torch.load(file, weights_only=True), state)


class RunaiS3:
    """Run:ai's model streamer from a bucket. It loads states saved as safetensors."""

    def __init__(self, bucket: Bucket) -> None:
        from runai_model_streamer import SafetensorsStreamer

        os.environ |= {
            "AWS_ACCESS_KEY_ID": bucket.access_key,
            "AWS_SECRET_ACCESS_KEY": bucket.secret_key,
            "AWS_ENDPOINT_URL": bucket.endpoint,
            "AWS_DEFAULT_REGION": REGION,
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        self.bucket = bucket
        self.streamer: Any = SafetensorsStreamer

    def save(self, state: State, key: str) -> None:
        """One object, by obstore."""
        tensors = {name: tensor.detach() for name, tensor in state.tensors().items()}
        RawObstore(self.bucket).put(key, memoryview(safetensors.torch.save(tensors)), CONCURRENCY)

    @torch.no_grad()
    def load(self, key: str, state: State) -> None:
        """Streamed into its buffer, and copied into the live tensors."""
        live: Mapping[str, torch.Tensor] = state.tensors()
        with self.streamer() as streamer:
            streamer.stream_file(f"s3://{self.bucket.name}/{key}")
            for name, tensor in streamer.get_tensors():
                live[name].copy_(tensor)


class RawObstore:
    """Bare bytes, in concurrent parts and ranges: the limit for a client in Rust."""

    def __init__(self, bucket: Bucket) -> None:
        from obstore.store import S3Store

        self.store: Any = S3Store(
            bucket.name, endpoint=bucket.endpoint, access_key_id=bucket.access_key, secret_access_key=bucket.secret_key,
            region=REGION, virtual_hosted_style_request=False, client_options={"allow_http": True},
            unsigned_payload=True,  # as ours: the hash of the payload would take most of its time
        )  # fmt: skip

    def put(self, key: str, data: memoryview, concurrency: int) -> None:
        """A multipart upload."""
        import obstore

        obstore.put(self.store, key, data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=concurrency)

    def get(self, key: str, into: memoryview, concurrency: int, range_bytes: int = PART_BYTES) -> None:
        """Ranges, copied to where they belong."""
        import obstore

        def fetch(at: int) -> None:
            end = min(at + range_bytes, len(into))
            into[at:end] = memoryview(obstore.get_range(self.store, key, start=at, end=end)).cast("B")

        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(fetch, range(0, len(into), range_bytes)))


PEERS: dict[str, Callable[[Bucket], S3Peer]] = {
    "s3torchconnector": S3TorchConnector,
    "s3torchconnector, DCP": S3Dcp,
    "torch over s3fs": TorchOverS3fs,
    "runai-model-streamer": RunaiS3,
}


def open_s3_peers(names: Iterable[str], bucket: Bucket) -> tuple[dict[str, S3Peer], dict[str, str]]:
    """Those that can be had; and why the others cannot."""
    peers: dict[str, S3Peer] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            peers[name] = PEERS[name](bucket)
        except Exception as error:  # an import may raise anything
            problems[name] = problem(error)
    return peers, problems
