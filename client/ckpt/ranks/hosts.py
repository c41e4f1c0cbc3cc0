"""The hosts of a job that share no folder: they meet, and each learns who has what (ckptapi.hosts)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from ckpt.ranks.world import World, together
from ckptapi.hosts import (
    NOTE,
    TRAINER,
    Agent,
    AgentStore,
    HostsStore,
    Members,
    boot_id,
    is_shard,
    limits,
    members_file,
    read_members,
)
from ckptstore import names
from ckptstore.errors import InvalidRequest, StoreUnavailable, StoreUnsafe, Unavailable
from ckptstore.format.decoding import convert, decode_json
from ckptstore.names import RunKeys, generation_number
from ckptstore.reading.source import StoreSource
from ckptstore.retry import pauses
from ckptstore.stores import Store
from ckptstore.stores.local import LocalStore
from ckptstore.threads import in_parallel
from ckptstore.tiers.source import TieredSource

logger = logging.getLogger(__name__)

_START_S = 60.0
_ANSWER_S = 3.0
_ANY_PORT = 9
_LOOPBACK = ("127.0.0.1", "127.0.1.1", "::1")
_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737)."""
_IDLE_S = 120
"""For how long an agent that a trainer started serves after the last trainer of its host."""
_AGAIN = 'until "$@"; code=$?; [ $code -lt 128 ]; do sleep 1; done; exit $code'
"""Runs an agent again if a signal ended it, with the address that other hosts know."""
_started: list[subprocess.Popen[bytes]] = []
"""Agents, which are not waited for."""
_FORMER = 16
"""Most hosts of earlier jobs that are still asked."""


def join_hosts(world: World, source: TieredSource, run: str, replicas: int) -> None:
    """Make the local tiers of all hosts one store, in which the first host decides. A collective of all ranks.

    Starts the agent of this host if it has none. On return the first host, and the `replicas` ones after it, have all
    documents of the run that any host has that answers. Raises, on every rank, the first error of any: InvalidRequest,
    StoreUnsafe if hosts hold different generations of one number, Unavailable if only lost hosts may have the
    newest checkpoint, and the remote store does not answer; RankLost.
    """
    store = source.local.store
    assert isinstance(store, HostsStore)
    own = store.own

    known = msgspec.json.encode(read_members(own.root, run) or Members())

    def introduce() -> Any:
        me = Agent(StoreSource(own).id(), agent_url(own.root, own.url), socket.gethostname())
        return msgspec.to_builtins((me, secrets.token_hex(32)))

    said = [convert(one, tuple[Agent, str]) for one in together(world, introduce)]
    # One rank sends what several know: a list of all hosts from each rank would be too much.
    told = [decode_json(data, Members) for data in world.gather_alike(known)]
    members, before = agreed([agent for agent, _ in said], told, said[0][1], replicas)
    ids = [agent.id for agent, _ in said]
    first_here = ids.index(ids[world.rank]) == world.rank

    def note(meeting: bool) -> None:
        if first_here:
            path = members_file(own.root, run)
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.touch(mode=0o600)
            new.write_bytes(msgspec.json.encode(replace(members, meeting=meeting)))
            new.replace(path)

    def gather() -> None:
        group = store.group(RunKeys(run).folder)
        assert group is not None
        if first_here and own in group.hosts[: replicas + 1]:
            in_parallel(lambda other: copy_documents(other, own, run), group.ring)
            for other in group.former:
                with suppress(StoreUnavailable):  # check_lost counts those of the last job
                    copy_documents(other, own, run)

    def check() -> None:
        if world.rank == 0:
            check_lost(source, run, members, before)

    together(world, check)  # if it fails, the next start must find the same hosts lost
    # Savers of a killed job go on in the new one, but must decide nothing that a lost host had decided.
    together(world, partial(note, True))
    together(world, gather)
    together(world, partial(note, False))
    if world.rank == 0:
        warn_of_limits(own, replicas)


def warn_of_limits(own: LocalStore, replicas: int) -> None:
    """Log what this local tier does not survive."""
    for limit in limits(own, replicas):
        logger.warning("%s", limit)


def agreed(agents: Sequence[Agent], told: Sequence[Members], token: str, replicas: int) -> tuple[Members, Members]:
    """The hosts of the run now, by the agent of each rank, and as the newest job before this one had them, by what they
    know. Pure.

    token: for a run that has none. Raises InvalidRequest if an agent is out of the reach of others, or two hosts have
    folders with one id.
    """
    hosts = tuple({agent.id: agent for agent in agents}.values())
    places = {(one.id, one.url) for one in hosts}  # pods of one host have names of their own
    if twin := next((one for one in agents if (one.id, one.url) not in places), None):
        raise InvalidRequest(
            f"the local tier of {twin.host} has the id of another host's: both are one folder, or one is a copy",
            f"Leave out replicas= for a folder that hosts share; else remove {names.STORE_ID} from one of the two",
        )
    alone = [one.host for one in hosts if urlsplit(one.url).hostname in _LOOPBACK]
    if alone and len(hosts) > 1:
        raise InvalidRequest(
            f"the agents of {', '.join(alone)} listen on a loopback address, which other hosts do not reach",
            "Start `ckptd agent --host ADDRESS` there before the job, or give hosts names of other addresses",
        )
    before = max(told, key=lambda known: known.version)
    urls, ids = {one.url for one in hosts}, {one.id for one in hosts}
    known = {one.id: one for members in told for one in (*members.former, *members.hosts)}
    former = [one for one in known.values() if one.id not in ids and one.url not in urls]
    return Members(before.version + 1, before.token or token, replicas, hosts, tuple(former[-_FORMER:])), before


def check_lost(source: TieredSource, run: str, members: Members, before: Members) -> None:
    """Warn of hosts of the job before that do not answer, if only they may have the newest checkpoint. Raises
    Unavailable if the remote store does not answer either."""
    here = {one.id for one in members.hosts}
    folder = RunKeys(run).folder
    gone = [one for one in before.hosts if one.id not in here and not AgentStore(one, folder, members.token).answers()]
    if not gone or len(gone) <= before.replicas:
        return
    lost = (
        f"{len(gone)} of the {len(before.hosts)} hosts that had run {run!r} do not answer "
        f"({', '.join(one.host for one in gone)}), with {before.replicas} replicas: "
        f"what was saved last may be lost with them"
    )
    try:
        next(source.store.list_folders(f"{folder}/"), None)
    except Unavailable as error:
        raise StoreUnavailable(
            f"{lost}; and {error.message}", "Wait for one of them, or for the remote store"
        ) from error
    logger.warning("%s. The newest checkpoint that is whole, here or in %s, is restored", lost, source.url)


def copy_documents(other: Store, own: Store, run: str) -> None:
    """Copy the documents of a run that this host lacks.

    Raises StoreUnavailable if the other one does not answer, and StoreUnsafe if the two have different generations of
    the same number: trainers that could not reach each other began them.
    """
    folder = RunKeys(run).folder + "/"
    there = {info.key for info in own.list(folder)}
    for key in (info.key for info in other.list(folder) if not is_shard(info.key)):
        if key not in there:
            own.put(key, other.get(key))
        elif generation_number(key) is not None and other.get(key) != own.get(key):
            raise StoreUnsafe(
                f"{other.url} has another {key} than this host: two jobs of run {run!r} saved without each other",
                f"Decide which host goes on. Copy what the others have (ckptctl cp), and remove {folder} there",
            )


def agent_url(folder: Path, url: str) -> str:
    """The URL of the agent of a folder of this host, which is started if there is none.

    Raises InvalidRequest if it ends at once, and StoreUnavailable if it does not answer.
    """
    notes = folder / names.HOSTS
    notes.mkdir(mode=0o700, exist_ok=True)
    (notes / f"{TRAINER}{os.getpid()}").touch()
    with open(notes / "start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := _answering(notes)) is not None:
            return found
        with socket.create_server(("", 0)) as free:
            port = str(free.getsockname()[1])
        command = [
            sys.executable, "-m", "ckptd", "agent", "--store", url, "--host", own_address(), "--port", port,
            "--idle-seconds", str(_IDLE_S), "--log-level", "warning",
        ]  # fmt: skip
        with open(notes / "agent.log", "wb") as log:  # it outlives the programs that read the output of the job
            started = subprocess.Popen(
                ["sh", "-c", _AGAIN, "sh", *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        _started.append(started)
        for pause in pauses(0.05, 0.5, timeout_s=_START_S):
            if (found := _answering(notes)) is not None:
                return found
            if started.poll():
                raise InvalidRequest(
                    f"the agent of {url} ended with exit status {started.returncode}",
                    f"Look at {log.name}. replicas= needs the daemon on each host: pip install 'ckptd[server]'",
                )
            time.sleep(pause)
    raise StoreUnavailable(f"the agent of {url} does not answer after {_START_S:.0f} s", f"Look at {log.name}")


def _answering(notes: Path) -> str | None:
    """The URL of the agent that has noted itself, if it answers."""
    with suppress(OSError, ValueError, KeyError):
        noted = json.loads((notes / NOTE).read_bytes())
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{noted['url']}/healthz", timeout=_ANSWER_S) as answer:
            # Another host's note is in a folder that was copied from there, or that hosts share.
            if json.load(answer)["id"] == noted["id"] and noted["boot"] == boot_id():
                return str(noted["url"])
    return None


def own_address() -> str:
    """The address of this host from which it reaches the first one of the job, or if it is that one, any other."""
    alone = os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1")
    first = os.environ.get("MASTER_ADDR") or socket.gethostname()
    for name in (first, _ELSEWHERE)[: 2 - alone]:
        with suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as reaching:
                reaching.connect(place)  # sends nothing
                found = str(reaching.getsockname()[0])
            if alone or not ip_address(found).is_loopback:  # as many hosts have their own names
                return found
    return "127.0.0.1"
