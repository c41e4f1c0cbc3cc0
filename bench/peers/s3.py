"""What others do with a bucket: s3torchconnector with torch.save, and obstore with bare bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from bench.peers.peer import give_back
from bench.state import State

PART_BYTES = 16 << 20
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where it is, and how to get in."""

    endpoint: str
    name: str
    access_key: str
    secret_key: str


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


class RunaiS3:
    """Run:ai's model streamer from a bucket; loads only, a safetensors object."""

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

    @torch.no_grad()
    def load(self, key: str, state: State) -> None:
        """Streamed into its buffer, and copied into the live tensors."""
        live: Mapping[str, torch.Tensor] = state.tensors()
        with self.streamer() as streamer:
            streamer.stream_file(f"s3://{self.bucket.name}/{key}")
            for name, tensor in streamer.get_tensors():
                live[name].copy_(tensor)


class RawObstore:
    """Bare bytes, in parts and ranges, so many at a time: what a client of Rust can do at best."""

    def __init__(self, bucket: Bucket) -> None:
        from obstore.store import S3Store

        self.store: Any = S3Store(
            bucket.name, endpoint=bucket.endpoint, access_key_id=bucket.access_key, secret_access_key=bucket.secret_key,
            region=REGION, virtual_hosted_style_request=False, client_options={"allow_http": True},
        )  # fmt: skip

    def put(self, key: str, data: memoryview, concurrency: int) -> None:
        """A multipart upload."""
        import obstore

        obstore.put(self.store, key, data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=concurrency)

    def get(self, key: str, into: memoryview, concurrency: int) -> None:
        """Ranges, copied to where they belong."""
        import obstore

        def fetch(at: int) -> None:
            end = min(at + PART_BYTES, len(into))
            into[at:end] = memoryview(obstore.get_range(self.store, key, start=at, end=end)).cast("B")

        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(fetch, range(0, len(into), PART_BYTES)))
