"""Fixtures of all tests: stores to write to."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import ssl
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings

from ckpt.host.lock import KNOWN, LOCAL
from ckptstore.stores import Store, open_store
from tests.support import azurite, ceph, forking, gcs, postgresql, seaweed
from tests.support.juicefs import running_gateway
from tests.support.postgresql import PostgresqlServer
from tests.support.seaweed import BUCKET, S3Service

ALL_STORES = os.environ.get("CKPTD_STORES") == "all"
STORE_KINDS = ("local", "memory", "s3", "gcs", "azure", *(("ceph",) if ALL_STORES else ()))
DATABASE_KINDS = ("sqlite", "postgresql")
_LONG = ("docs", "integration", "protocol")

every_store = pytest.mark.parametrize("store", STORE_KINDS, indirect=True)
in_memory = pytest.mark.parametrize("store", ["memory"], indirect=True)
here_and_in_memory = pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
on_both = pytest.mark.parametrize("db_url", DATABASE_KINDS, indirect=True)

# Workers share the cores: torch's threads must sleep while they wait for each other, not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests leave nothing running: savers of trainers that they kill end when they are done, unless a test says otherwise.
os.environ.setdefault("CKPT_RETAIN_SNAPSHOT_S", "0")

# The same examples in every run, and no limit on the time of one: other tests share the cores.
EXAMPLES = int(os.environ.get("CKPTD_EXAMPLES", "60"))
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=EXAMPLES)
settings.load_profile("repeatable")

# For the same reason no request ends after httpx's five seconds, unless a test says so.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, 60.0)


# The certificates of authorities are read once, not for each request and client: 25 ms of a core.
@functools.cache
def _tls(file: str | None, verify: Any, cert: Any) -> ssl.SSLContext:
    return httpx.create_ssl_context(verify, cert)


httpx._transports.default.__dict__["create_ssl_context"] = lambda verify=True, cert=None, trust_env=True: _tls(
    os.environ.get("SSL_CERT_FILE"), verify, cert
)


def pytest_configure(config: pytest.Config) -> None:
    """Remove the notes of earlier sessions (ckpt.host.lock): they name folders that this session may use again.

    A shell that starts this in the background ignores SIGINT, and processes that tests interrupt would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        forking.controllers.append(config.workerinput["hosts"])
    else:
        folder = Path(tempfile.gettempdir(), f"ckpt-{os.getuid()}")
        for note in chain(folder.glob(f"*.{KNOWN}"), folder.glob(f"*.{LOCAL}")):
            with contextlib.suppress(FileNotFoundError):  # another session of pytest may remove it too
                if "/pytest-of-" in note.read_text():
                    note.unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller of workers, of each."""
    node.workerinput["hosts"] = forking.share_hosts()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: workers are dealt files in this order, and none should get a long one last.

    They are those with slow tests, then those of folders whose names are last in the alphabet.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name not in _LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay: no garbage collection, which tests also ask for, has to look at their objects."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@dataclass(frozen=True, slots=True)
class S3Location:
    """An empty place on a real S3 service."""

    url: str
    service: S3Service

    @property
    def options(self) -> dict[str, Any]:
        return self.service.options

    @property
    def environment(self) -> dict[str, str]:
        """The same for another process, which is given the URL only."""
        return {**os.environ, **self.service.environment}


@pytest.fixture(scope="session")
def s3_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """One SeaweedFS server per worker that needs one."""
    with seaweed.running_service(tmp_path_factory.mktemp("seaweed")) as service:
        yield service


@pytest.fixture
def s3_store(s3_service: S3Service) -> S3Location:
    """A fresh prefix on the S3 service."""
    return S3Location(f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_service)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """An S3 service that overwrites on create; one per worker that needs one."""
    with running_gateway(tmp_path_factory.mktemp("juicefs")) as service:
        yield service


@pytest.fixture
def overwriting(gateway: S3Service) -> Store:
    """A fresh prefix on it."""
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", gateway.options)


@pytest.fixture(scope="session")
def gcs_service() -> Iterator[str]:
    """One per worker that needs one."""
    pytest.importorskip("gcsfs")
    with gcs.running_service() as url:
        yield url


@pytest.fixture(scope="session")
def azure_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Azurite per worker that needs one."""
    pytest.importorskip("adlfs")
    if azurite.binary() is None:
        pytest.skip("no azurite-blob program: npm install -g azurite")
    with azurite.running_service(tmp_path_factory.mktemp("azurite")) as url:
        yield url


@pytest.fixture(scope="session")
def ceph_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One per worker that needs one."""
    if not ceph.installed():
        pytest.skip("no Ceph: apt-get install radosgw ceph-mon ceph-osd ceph-common")
    with ceph.running_service(tmp_path_factory.mktemp("ceph")) as service:
        yield service.endpoint


def cloud_service(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of the service of a kind."""
    service = request.getfixturevalue(f"{kind}_service")
    return service.endpoint if isinstance(service, S3Service) else service


def cloud_options(kind: str, url: str) -> dict[str, str]:
    """What reaches the service of a kind at a URL, or a proxy in front of it."""
    if kind == "azure":
        return {"connection_string": azurite.connection(url)}
    return {"endpoint_url": url, "token": "anon"} if kind == "gcs" else S3Service(url).options


def cloud_place(kind: str) -> str:
    """A fresh prefix."""
    scheme = {"azure": "abfs", "gcs": "gs"}.get(kind, "s3")
    return f"{scheme}://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module", autouse=True)
def empty_memory() -> None:
    """fsspec's memory is one for the process, and every listing reads all of it: what other files left has to go."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A fresh store; a folder unless the test is parametrised, indirectly, over STORE_KINDS."""
    kind = getattr(request, "param", "local")
    if kind == "s3":
        location: S3Location = request.getfixturevalue("s3_store")
        yield open_store(location.url, location.options)
    elif kind in ("gcs", "azure", "ceph"):
        yield open_store(cloud_place(kind), cloud_options(kind, cloud_service(request, kind)))
    elif kind == "memory":
        memory = open_store(f"memory://{uuid.uuid4().hex}")
        yield memory
        memory.delete_many([info.key for info in memory.list("")])
    else:
        yield open_store(str(tmp_path / "store"))


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgresqlServer]:
    """One PostgreSQL server per worker that needs one."""
    with postgresql.running_server() as server:
        yield server


@pytest.fixture
def db_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database; SQLite unless the test is parametrised, indirectly, over DATABASE_KINDS."""
    if getattr(request, "param", "sqlite") == "postgresql":
        server: PostgresqlServer = request.getfixturevalue("postgresql_server")
        return server.new_database()
    return f"sqlite:///{tmp_path / 'index.db'}"
