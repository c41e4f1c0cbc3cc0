"""The local tier of hosts that share nothing, as one store (docs/decisions/0045).

Each host has a folder, and an agent (`ckptd agent`) that serves it to the other hosts of its jobs. A shard lies on the
host that wrote it and on `replicas` others. All other objects, the documents, lie on the first host of the job, whose
folder decides create-only writes, and on the `replicas` hosts after it.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import compress, groupby, islice, starmap
from pathlib import Path
from queue import Queue
from select import select
from ssl import SSLError
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import xxhash
from typing_extensions import override

from ckptstore import names
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, InvalidRequest, ObjectMissing, StoreFull, StoreUnavailable
from ckptstore.format.decoding import decode_json
from ckptstore.names import RunKeys
from ckptstore.stores import ObjectInfo, ObjectReader, ObjectWriter, Store, WrappedStore, open_store
from ckptstore.stores.local import LocalStore
from ckptstore.threads import in_parallel
from ckptstore.values import Value

logger = logging.getLogger(__name__)

NOTE, TRAINER = "_agent.json", "_trainer-"
"""In the folder names.HOSTS of a local tier: where the agent is, and the processes with these ids, which need it. A run
has no such name."""
PROOF = "Ckptd-Proof"
_MEMORY = ("ramfs", "tmpfs")
PEER = "peer"
"""The name of other hosts among the sources of a restore."""
_CONNECT_S, _ANSWER_S = 3.0, 10.0
_PARTIAL = 206
_AWAY_S = 10.0
"""For how long an agent that does not answer is not asked again."""
_SLOW_S, _LEAST_BYTES_PER_S = 5.0, 8e6
"""A copy ends if it takes this long, and one second more for this number of bytes."""
_NEAREST = 4
"""How many hosts are asked at once for a shard."""
BLOCK_BYTES = 4 << 20
_MORE = 2
"""Most hosts that are asked after those next to this one: a save waits for them."""
_BLOCKS = 4
"""Most blocks of a copy that wait to be sent."""
_T = TypeVar("_T")


class Agent(Value):
    """The agent of a host, and the folder that it serves."""

    id: str
    """The id of the folder (StoreSource.id)."""
    url: str
    host: str
    """The name of the host, for messages."""


class Members(Value):
    """The hosts of a run, as each of them has it in a file of its folder."""

    version: int = 0
    """Rises with each job."""
    token: str = ""
    """Known to the hosts of the run alone; each proves to the other that it has it."""
    replicas: int = 0
    hosts: tuple[Agent, ...] = ()
    """The hosts of the newest job, in the order of their lowest ranks."""
    former: tuple[Agent, ...] = ()
    """Hosts of earlier jobs, which are only read."""
    meeting: bool = False
    """The first hosts do not have all documents yet, so that none may be read or written."""


def boot_id() -> str:
    """The id of this boot of the host, equal in all its containers; empty where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def members_file(folder: Path, run: str) -> Path:
    """The file with the Members of a run, or of its folder."""
    return folder / names.HOSTS / f"{run.replace('/', '~')}.json"


def read_members(folder: Path, run: str) -> Members | None:
    """The hosts of a run; None if it has a folder alone."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        return decode_json(members_file(folder, run).read_bytes(), Members)
    return None


def limits(own: LocalStore, replicas: int) -> Iterator[str]:
    """How long a local tier lasts, if that is less than the loss of a host."""
    if own.kind in _MEMORY:
        yield f"{own.url} is in memory: what is saved there lasts as long as its host runs"
    if not replicas:
        yield f"replicas=0: what is saved to {own.url} survives restarts, not the loss of a host or its disk"


def proof(token: str, *parts: str) -> str:
    """That its maker knows the token: an HMAC (RFC 2104) of these parts."""
    return hmac.new(token.encode(), "\n".join(parts).encode(), "sha256").hexdigest()


def open_local(url: str, options: Mapping[str, Any] | None = None, retried: bool = False) -> Store:
    """The store of a local tier: a folder whose runs may have several hosts, or any other store."""
    store = open_store(url, options, retried)
    return HostsStore(store) if isinstance(store, LocalStore) else store


class AgentStore(Store):
    """The objects of one run in the folder of another host, by its agent. For any thread.

    A request that gets no answer within seconds is StoreUnavailable, and so are the next ones for a while.
    """

    one_winner = True
    away_until = 0.0
    """By time.monotonic()."""

    def __init__(self, agent: Agent, run: str, token: str) -> None:
        """run: the name of its folder."""
        self.agent, self.url, self.identity = agent, agent.url, f"{agent.url} {agent.id}"
        self._run, self._token = run, token
        self._idle: list[HTTPConnection] = []
        """Open connections, each used by one thread at a time."""

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._ask("PUT", key, bytes(data))

    @override
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return bool(self._ask("PUT", key, bytes(data), create="1").headers["Ckptd-Created"] == "1")

    open_writer = Store.open_replacement

    def send(self, key: str, blocks: Iterable[Buffer | None]) -> None:
        """Write an object, as its blocks come; None drops it. Raises StoreUnavailable if the agent is too slow."""
        digest = xxhash.xxh3_128()

        def watched() -> Iterator[Buffer]:
            busy_s, num_bytes = 0.0, 0
            for block in blocks:
                if block is None:
                    raise InvalidRequest("the object was dropped")
                digest.update(block)
                began = time.monotonic()
                yield block
                busy_s += time.monotonic() - began
                num_bytes += len(block)
                if busy_s > _SLOW_S + num_bytes / _LEAST_BYTES_PER_S:
                    raise StoreUnavailable(f"{self.url} takes {num_bytes / busy_s / 1e6:.1f} MB/s, which is too slow")

        if self._ask("PUT", key, watched()).data != digest.hexdigest().encode():
            self.delete_many([key])
            raise StoreUnavailable(f"{self.agent.host} wrote other bytes of {key}")

    @override
    def get(self, key: str) -> bytes:
        return self._ask("GET", key).data

    @override
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        last = offset + len(buffer) - 1
        return self._ask("GET", key, headers={"Range": f"bytes={offset}-{last}"}, into=buffer).length

    @override
    def open_reader(self, key: str) -> ObjectReader:
        self.size(key)
        return super().open_reader(key)

    @override
    def size(self, key: str) -> int:
        return int(self._ask("HEAD", key).headers["Content-Length"])

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return starmap(ObjectInfo, json.loads(self._ask("GET", "", prefix=prefix).data))

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        return iter(json.loads(self._ask("GET", "", folders=prefix).data))

    @override
    def delete_many(self, keys: Iterable[str]) -> None:
        self._ask("POST", "", json.dumps(list(keys)).encode())

    def answers(self) -> bool:
        """Whether the host is there, and knows the run's token."""
        return _error_of(self._ask, "GET", "") is None

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    __del__ = close

    def _ask(
        self, method: str, key: str, body: bytes | Iterator[Buffer] = b"", headers: Mapping[str, str] = {},
        into: memoryview | None = None, **query: str,
    ) -> _Answer:  # fmt: skip
        connection, idle = self._take()
        try:
            target, signed = self.signed(method, key, query)
            with suppress(ConnectionError, SSLError):  # it may have said why it takes no more
                connection.request(method, target, body, {**headers, **signed})
            reply = connection.getresponse()
            length = reply.readinto(into) if into is not None and reply.status == _PARTIAL else 0
            data = reply.read()
        except CkptError:  # of the body
            connection.close()
            raise
        except (HTTPException, OSError) as error:
            connection.close()
            if not idle or isinstance(error, TimeoutError) or not isinstance(body, bytes):
                raise self._failure(f"{method} {key or query}", error) from error
            return self._ask(method, key, body, headers, into, **query)  # the agent has closed it meanwhile
        if connection.sock is not None:  # http.client opens a closed one again, without proof
            self._idle.append(connection)
        match reply.status:
            case 200 | 206 | 416:
                return _Answer(reply.headers, data, length)
            case 404:
                raise ObjectMissing(f"{self.agent.host} at {self.url}: {data.decode(errors='replace')[:200]}")
            case 507:
                raise StoreFull(f"the disk of {self.agent.host} is full", "Free space there")
        raise StoreUnavailable(f"the agent of {self.agent.host} at {self.url} answers {reply.status}: {data[:200]!r}")

    def signed(self, method: str, key: str, query: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """The target of a request, and a header that proves that this host has the token."""
        nonce, words = os.urandom(16).hex(), urlencode(query)
        proved = f"Ckptd {self._run} {nonce} {proof(self._token, nonce, method, key, words)}"
        return f"/objects/{quote(key)}{f'?{words}' if words else ''}", {"Authorization": proved}

    def _take(self) -> tuple[HTTPConnection, bool]:
        """A connection, and whether it was idle before."""
        with suppress(IndexError):  # another thread was faster
            while select([(idle := self._idle.pop()).sock], (), (), 0)[0]:
                idle.close()  # the agent has closed it
            return idle, True
        if time.monotonic() < self.away_until:
            raise StoreUnavailable(f"the agent of {self.agent.host} at {self.url} did not answer before")
        return self._connect(), False

    def _failure(self, what: str, error: Exception) -> StoreUnavailable:
        """The error of a request without an answer, after which the agent is not asked for a while."""
        self.away_until = time.monotonic() + _AWAY_S
        return StoreUnavailable(
            f"the agent of {self.agent.host} at {self.url} failed to {what}: {type(error).__name__}: {error}",
            "Look at that host: it serves its local tier by `ckptd agent`",
        )

    def _connect(self) -> HTTPConnection:
        """A connection to the agent, which has proved that it serves this folder, and knows the token."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        made = kind(parts.netloc, timeout=_CONNECT_S, blocksize=1 << 20)
        try:
            target, headers = self.signed("GET", "", {})
            made.request("GET", target, headers=headers)
            answer, nonce = made.getresponse(), headers["Authorization"].split()[2]
            answer.read()
            if answer.headers.get(PROOF) != proof(self._token, nonce, self.agent.id):
                raise ValueError("it serves another folder, or does not know the token of the run")
            made.sock.settimeout(_ANSWER_S)
            return made
        except (AttributeError, HTTPException, OSError, ValueError) as error:  # no socket: it ends
            made.close()
            raise self._failure("connect", error) from error


@dataclass
class _Answer:
    headers: Any
    data: bytes
    length: int


@dataclass
class _Group:
    """The hosts of one run, seen from one of them."""

    own: LocalStore
    members: Members
    hosts: list[Store]
    """The stores of the job, in order; `own` if this host is one of them."""
    former: list[Store]
    warned: int = 0
    """1: that copies are on other hosts than the next ones; 2: that there are too few."""

    @property
    def holders(self) -> list[Store]:
        """The stores with the documents; the first one decides."""
        if self.members.meeting:
            hint = "Try again; if the job has ended, start it again"
            raise StoreUnavailable(f"the hosts of a job in {self.own.url} have not met yet", hint)
        return self.hosts[: self.members.replicas + 1]

    @property
    def ring(self) -> list[AgentStore]:
        """The other hosts of the job, the next one first."""
        at = self.hosts.index(self.own) if self.own in self.hosts else 0
        return [store for store in self.hosts[at:] + self.hosts[:at] if isinstance(store, AgentStore)]

    @property
    def everywhere(self) -> list[Store]:
        """All stores, nearest first."""
        return [self.own, *self.ring, *self.former]

    def note_copies(self, key: str, results: Sequence[object]) -> None:
        """Say once that an object lies on others than the next hosts, and once that it lies on too few; an object
        without errors ends that. results: an error, or None for each copy."""
        copies, errors = results.count(None), [*filter(None, results)]
        short, before = copies < self.members.replicas, self.warned
        self.warned = short + bool(errors or short)
        if self.warned > before:
            logger.warning(
                "%s lies on %d other hosts and not on %s: %s", key, copies,
                f"{self.members.replicas}, so that the loss of a host may lose it" if short else "the next ones",
                *errors[:1] or ["the job has no more"],
            )  # fmt: skip


class HostsStore(WrappedStore):
    """The local tier of a host. A run without Members is in the folder of this host alone. For any thread.

    A read takes the nearest copy. A shard that no host of the job takes within the bound of its rate is on this host
    only, with a warning: no save fails, or waits, for a peer. A document raises StoreUnavailable if the first host of
    the job does not answer.
    """

    def __init__(self, own: LocalStore) -> None:
        super().__init__(own)
        self.own = own
        self._groups: dict[str, _Group] = {}
        """By run, as its file says."""
        self._first = 0
        """1: a shard on this host is not read."""

    @property
    @override
    def on_this_host(self) -> bool:
        return self.own.on_this_host and not (self.own.root / names.HOSTS).is_dir()

    @property
    @override
    def elsewhere(self) -> Sequence[Store]:
        """The same store without the shards of this host."""
        others = HostsStore(self.own)
        others._first = 1
        return [others]

    def group(self, key: str) -> _Group:
        """The hosts of the run of a key, as the newest job that met here has them; this one if it is here alone."""
        run = key.partition("/")[0]
        members = read_members(self.own.root, run) or Members()
        known = self._groups.get(run)
        if known is None or known.members != members:
            id = self.own.get(names.STORE_ID).decode() if members.hosts else ""
            peer = partial(AgentStore, run=run, token=members.token)
            hosts = list[Store](self.own if one.id == id else peer(one) for one in members.hosts)
            former = list[Store](map(peer, members.former))
            known = self._groups[run] = _Group(self.own, members, hosts or [self.own], former)
        return known

    def copies(self, key: str) -> Iterator[Store]:
        """The other hosts that have a shard, nearest first. Asks most of them only if the nearest do not have it."""
        others = self.group(key).everywhere[1:]
        for some in (others[:_NEAREST], others[_NEAREST:]):
            yield from compress(some, in_parallel(partial(_has, key), some))

    @override
    def put(self, key: str, data: Buffer) -> None:
        """A document; shards are written by `open_writer`."""
        group = self.group(key)
        group.holders[0].put(key, data)
        self._spread(group, key, data)

    @override
    def put_if_absent(self, key: str, data: Buffer) -> bool:
        group = self.group(key)
        first, *others = group.holders
        created = first.put_if_absent(key, data)
        # Its creator may have ended before the other hosts had it.
        self._spread(group, key, data if created or not others else first.get(key))
        return created

    def _spread(self, group: _Group, key: str, data: Buffer) -> None:
        results = in_parallel(lambda store: _error_of(store.put, key, data), group.holders[1:])
        group.note_copies(key, results)

    @override
    def _open(self, call: Callable[..., ObjectWriter], *args: Any) -> ObjectWriter:
        return _Tee(self.group(args[0]), args[0], call(*args))

    @override
    def _request(self, call: Callable[..., _T], *args: Any) -> _T:
        """A read, by the nearest store that has the object."""
        errors: list[CkptError] = []
        for store in self._places(args[0]):
            try:
                result: _T = getattr(store, call.__name__)(*args)
                return result
            except (ObjectMissing, StoreUnavailable) as error:
                if store is self.own and not isinstance(error, ObjectMissing):
                    raise
                errors.append(error)
        # It is missing if any of them answers that; the others did not answer.
        none = ObjectMissing(f"no other host is there to have {args[0]}")
        raise min(errors, key=lambda error: not isinstance(error, ObjectMissing), default=none)

    def _places(self, key: str) -> Sequence[Store]:
        group = self.group(key)
        if is_shard(key):
            return group.everywhere[self._first :]
        return sorted(group.holders, key=lambda store: store is not self.own)

    @override
    def open_reader(self, key: str) -> ObjectReader:
        return self._request(self.own.open_reader, key)

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        listed = self._listed(self.own.list, prefix)
        return iter(sorted({info.key: info for info in reversed(listed)}.values()))

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        found = {*self._listed(self.own.list_folders, prefix)}
        if not prefix:  # this host may have nothing else of a run
            found |= {note.stem for note in (self.own.root / names.HOSTS).glob("[!_]*.json")}
        return iter(sorted(found))

    def _listed(self, call: Callable[[str], Iterator[_T]], prefix: str) -> Sequence[_T]:
        """The listing of all hosts, the nearest first, if there may be shards; else of the first one that answers."""

        def listing(store: Store) -> Sequence[_T] | None:
            try:
                return [*getattr(store, call.__name__)(prefix)]
            except StoreUnavailable as error:
                logger.debug("without another host: %s", error)
                return None

        group, folder = self.group(prefix), prefix.partition("/")[2]
        if group.everywhere == [self.own]:
            return [*call(prefix)]
        # Receipts are listed by the beginning of their names, often.
        if not folder or (folder.startswith("attempts/") and folder.endswith("/")):
            return [one for found in in_parallel(listing, group.everywhere) for one in found or ()]
        for store in group.holders:
            if (found := listing(store)) is not None:
                return found
        raise StoreUnavailable(f"none of the {len(group.holders)} hosts with the documents of {prefix} answers")

    @override
    def delete_many(self, keys: Iterable[str]) -> None:
        for run, some in groupby(keys, lambda key: key.partition("/")[0]):
            group, own = self.group(run), [*some]
            needed = (self.own, group.holders[0])
            for store in group.everywhere:
                try:
                    store.delete_many(own)
                except CkptError:
                    if store in needed:
                        raise


def copy_missing_shards(url: str, keys: Iterable[str]) -> None:
    """Copy to this host the shards that lie on too few hosts, if it is the next one after a host that has them.

    Shards that no host has are left. Raises StoreUnavailable or StoreFull.
    """
    store = open_local(url)
    assert isinstance(store, HostsStore)
    for key in filter(is_shard, keys):
        group = store.group(key)
        there = in_parallel(partial(_has, key), group.hosts)
        first = there.index(True) if any(there) else 0
        lacking = [one for one, has in zip(group.hosts, there, strict=True) if not has]
        after = lacking[first:] + lacking[:first]  # all of those before the first one lack it
        if store.own in after[: max(0, group.members.replicas + 1 - sum(there))]:
            for other in islice(store.copies(key), 1):
                with store.own.open_replacement(key, other.size(key)) as writer:
                    for block in _blocks(other, key):
                        writer.write(block)


def _blocks(store: Store, key: str) -> Iterator[memoryview]:
    """The bytes of an object."""
    size = store.size(key)
    with store.open_reader(key) as reader:
        for at in range(0, size, BLOCK_BYTES):
            yield reader.read_once(at, min(BLOCK_BYTES, size - at))


@dataclass
class PeerShards:
    """Shards on other hosts, as a source of chunks: copy `number` of each, the nearest first."""

    store: HostsStore
    number: int
    parallel_reads = 4
    longest_read = 0

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """Raises ObjectMissing if fewer hosts have it."""
        key = RunKeys(checkpoint.run).shard(checkpoint.attempt, shard)
        for found in islice(self.store.copies(key), self.number, None):
            return found.open_reader(key)
        raise ObjectMissing(f"no other host that answers has copy {self.number + 1} of {key}")


@dataclass
class _Tee(ObjectWriter):
    """Writes on this host, and sends the same blocks to others."""

    group: _Group
    key: str
    own: ObjectWriter
    block: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        now, ring, count = time.monotonic(), self.group.ring, self.group.members.replicas
        peers = [store for store in ring if store.away_until < now]
        self.failed = [f"{one.url} did not answer" for one in ring[:count] if one not in peers]
        self.copies = [_Copy(store, self.key) for store in peers[:count]]
        self.left = peers[count : count + _MORE]
        """Hosts that may take a copy if another one does not."""

    def write(self, data: Buffer) -> None:
        self.own.write(data)
        if self.copies:
            self.block += data
            if len(self.block) >= BLOCK_BYTES:
                self._send(bytes(self.block))
                self.block.clear()

    def _send(self, *blocks: bytes | None) -> None:
        for copy in self.copies:
            for block in blocks:
                copy.blocks.put(block)

    def commit(self) -> None:
        self._send(bytes(self.block), b"")
        self.own.commit()
        for copy in self.copies:
            copy.join()
        errors, wanted = [copy.error for copy in self.copies], self.group.members.replicas
        while errors.count(None) < wanted and self.left:  # from this disk
            errors.append(_error_of(self.left.pop(0).send, self.key, _blocks(self.group.own, self.key)))
        self.group.note_copies(self.key, [*self.failed, *errors])

    def abort(self) -> None:
        self._send(None, b"")
        self.own.abort()
        for copy in self.copies:
            copy.join()


class _Copy(threading.Thread):
    """A copy of an object on another host, as its blocks come."""

    def __init__(self, store: AgentStore, key: str) -> None:
        super().__init__(name="ckpt-copy-to-host", daemon=True)
        self.blocks: Queue[bytes | None] = Queue(_BLOCKS)
        """b"" ends the object, None drops it."""
        self.error: CkptError | None = None
        self._store, self._key = store, key
        self.start()

    def run(self) -> None:
        blocks = iter(self.blocks.get, b"")
        self.error = _error_of(self._store.send, self._key, blocks)
        for _ in blocks:  # its writer goes on without it
            pass


def is_shard(key: str) -> bool:
    """Whether a key names a shard; all other objects are documents."""
    return "/attempts/" in key and not key.endswith((".json", ".zst"))


def _has(key: str, store: Store) -> bool:
    return _error_of(store.size, key) is None


def _error_of(call: Callable[..., object], *args: object) -> CkptError | None:
    try:
        call(*args)
    except CkptError as error:
        return error
    return None
