"""Saves to Google's and Azure's services and restores from them, over the network of remote-s3.

The services are the tests' own server and Azurite, in processes of their own. The limit is obstore, as there.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.measuring import in_turns
from bench.peers.s3 import RawObstore
from bench.remote_s3 import Contestant, contestants_over, network, report
from bench.report import Report
from bench.state import trained, wanted_bytes
from ckptstore.stores import Store, open_store
from tests.support import azurite, gcs
from tests.support.seaweed import BUCKET

OURS = ("ckptd, off",)


class RawCloud(RawObstore):
    """The same with obstore's clients for other services."""

    def __init__(self, store: Any) -> None:
        self.store = store


@dataclass(frozen=True, slots=True)
class Google:
    """A running service with one bucket."""

    endpoint: str
    scheme = "gs"

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec."""
        return {"endpoint_url": self.endpoint, "token": "anon"}

    @property
    def raw(self) -> RawObstore:
        """obstore's client."""
        from obstore.store import GCSStore

        account = {"gcs_base_url": self.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
        key = json.dumps({**account, "private_key_id": ""})
        return RawCloud(GCSStore(BUCKET, service_account_key=key, client_options={"allow_http": True}))

    def url(self, folder: str) -> str:
        """URL of a folder in the bucket."""
        return f"{self.scheme}://{BUCKET}/{folder}"

    def store(self, folder: str) -> Store:
        """A folder in the bucket."""
        return open_store(self.url(folder), self.options)

    def clear(self, folder: str) -> None:
        """Delete all objects of a folder."""
        store = self.store(folder)
        store.delete_many([info.key for info in store.list("")])


class Azure(Google):
    """A running Azurite."""

    scheme = "abfs"

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec."""
        return {"connection_string": azurite.connection(self.endpoint)}

    @property
    def raw(self) -> RawObstore:
        """obstore's client."""
        from obstore.store import AzureStore

        account = {"account_name": azurite.ACCOUNT, "account_key": azurite.KEY}
        endpoint = f"{self.endpoint}/{azurite.ACCOUNT}"
        return RawCloud(AzureStore(BUCKET, **account, endpoint=endpoint, client_options={"allow_http": True}))


def measure(quick: bool) -> Report:
    """Uploads are deleted past the proxy, and not timed."""
    state = trained("fp32", wanted_bytes(quick))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-bench-")))
        services = {
            "Google": Google(stack.enter_context(_google())),
            "Azure": Azure(stack.enter_context(azurite.running_service(folder, in_memory=False))),
        }
        contestants: dict[str, Contestant] = {}
        for cloud, local in services.items():
            remote: Any = replace(local, endpoint=stack.enter_context(network(local.endpoint)))
            found = contestants_over(local, remote, state, stack, OURS)
            contestants |= {f"{cloud}: {name}": one for name, one in found.items()}
        times, problems = in_turns({name: one.call for name, one in contestants.items()})
    return report("remote-clouds", state, contestants, times, problems)


@contextmanager
def _google() -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _serve(control: Connection) -> None:
    with gcs.running_service(page=1000) as url:
        control.send(url)
        control.recv()
