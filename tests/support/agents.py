"""Hosts of a run in folders of this machine: real agents, in threads of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from ckptapi.hosts import Agent, HostsStore, Members, members_file
from ckptd.agent import AgentContext, create_agent
from ckptstore.stores.local import LocalStore
from tests.support.stores import serving

TOKEN = "known to these hosts"


@contextmanager
def running_agent(folder: Path) -> Iterator[Agent]:
    """The agent of a folder, while the block runs."""
    context = AgentContext(LocalStore(str(folder)))
    with serving(create_agent(context)) as url:
        yield Agent(context.id, url, folder.name)


def meet(folders: Sequence[Path], agents: Sequence[Agent], run: str = "run", replicas: int = 1) -> list[HostsStore]:
    """The local tier of each host of a job."""
    for folder in folders:
        members_file(folder, run).write_bytes(msgspec.json.encode(Members(1, TOKEN, replicas, tuple(agents))))
    return [HostsStore(LocalStore(str(folder))) for folder in folders]


@contextmanager
def running_hosts(folder: Path, count: int = 3, replicas: int = 1) -> Iterator[list[HostsStore]]:
    """The local tiers of several hosts, in folders named by numbers."""
    with ExitStack() as stack:
        folders = [folder / str(number) for number in range(count)]
        stores = meet(folders, [stack.enter_context(running_agent(one)) for one in folders], replicas=replicas)
        yield stores
