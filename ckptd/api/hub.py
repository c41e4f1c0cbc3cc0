"""The interface of the Hugging Face Hub: with HF_ENDPOINT=http://HOST:8470/hf its clients read checkpoints as models.

The repository of run `gpt` is `runs/gpt`, that of `team/gpt` is `team/gpt`. Any character may be written as its code,
as those must be that a repository cannot have: `runs/team_x2F_sweep_x2F_lr_x3D_0.1`. A revision is `main` (the newest
healthy checkpoint), `step-1000`, a tag or STEP.ULID; `+ITEM`, `+bf16` and `+fp16` behind it select a view. A commit is
STEP.ULID with its view, so its bytes never change.

Every byte that is sent was verified. A run that the caller may not read is answered like one that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ckptapi import bodies
from ckptd.http.access import OF_TOKEN, CallerDep
from ckptd.http.context import Context, Ctx
from ckptd.http.streaming import streamed
from ckptd.services import Catalog
from ckptd.services.tokens import Caller
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import BadInput, NoCheckpoint
from ckptstore.names import Reference
from ckptstore.reading.weights import PIECE_BYTES, VirtualFile
from ckptstore.retention.policy import healthiest

router = APIRouter(prefix="/hf", include_in_schema=False)

_MODEL = "/api/models/{namespace}/{name}"
_CODE = re.compile("_x([0-9A-F]{2})_")
_CODED = re.compile(r"[^\w.-]|[.-](?=[.-]|$)|_(?=x[0-9A-F]{2}_)", re.ASCII)
"""Characters that the clients refuse in a name, and those that would be read as a code."""
_REVISION = re.compile(r"(?:step-(?=\d+(?:\+|$)))?([^+]+)((?:\+(?!(?:bf|fp)16$)([^+]+))?(?:\+(bf16|fp16))?)", re.ASCII)
"""The checkpoint, and the view: an item and a type."""


class _Snapshot(NamedTuple):
    """One view of a checkpoint."""

    sha: str
    checkpoint: Checkpoint
    files: Mapping[str, VirtualFile]


async def _snapshot(request: Request, ctx: Ctx, caller: CallerDep, namespace: str, name: str) -> _Snapshot:
    """The revision in the path."""
    revision = request.path_params.get("revision", "main")
    return await ctx.with_store(_opened, ctx, caller, f"{namespace}/{name}", revision)


Snapshot = Annotated[_Snapshot, Depends(_snapshot)]


@router.get("/api/models")
async def models(ctx: Ctx, caller: CallerDep, author: str = "runs", search: str = "") -> Response:
    """The runs as models, all of them at once."""
    found = await ctx.with_index(ctx.catalog.runs)
    names = [
        "runs/" + _CODED.sub(lambda one: f"_x{ord(one[0]):02X}_", run.run) for run in found if caller.sees(run.run)
    ]
    return JSONResponse([{"id": name} for name in names if search in name and author == "runs"])


@router.get(_MODEL)
@router.get(_MODEL + "/revision/{revision:path}")
async def model(snapshot: Snapshot, namespace: str, name: str) -> Response:
    """The commit of a revision, and its files."""
    files = [{"rfilename": file} for file in snapshot.files]
    return JSONResponse({"id": f"{namespace}/{name}", "sha": snapshot.sha, "siblings": files})


@router.get(_MODEL + "/refs")
async def refs(ctx: Ctx, snapshot: Snapshot) -> Response:
    """The newest steps of the live lineage as branches, and their tags."""
    newest = await ctx.with_index(_committed, ctx.catalog, snapshot.checkpoint.run)
    branches = [_ref(f"step-{one.step}", one) for one in newest]
    tags = [_ref(tag, one) for one in newest for tag in one.tags]
    return JSONResponse({"branches": branches, "tags": tags, "converts": []})


@router.get(_MODEL + "/tree/{revision}")
@router.get(_MODEL + "/tree/{revision}/{path:path}")
def tree(snapshot: Snapshot, path: str = "", recursive: bool = False) -> Response:
    """The files and folders in a folder."""
    found = dict[str, dict[str, object]]()
    for name, file in snapshot.files.items():
        for folder in list(PurePosixPath(name).parents)[:-1]:
            found[str(folder)] = {"type": "directory", "path": str(folder), "oid": str(folder)}
        found[name] = {"type": "file", "path": name, "size": file.bytes, "oid": file.version}
    inside = path and f"{path}/"
    below = [name for name in found if name.startswith(inside) and (recursive or "/" not in name[len(inside) :])]
    if path and not below:
        raise _missing("EntryNotFound", f"{snapshot.checkpoint.id} has no folder {path!r}")
    return JSONResponse([found[name] for name in below])


@router.api_route("/{namespace}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
async def resolve(request: Request, ctx: Ctx, caller: CallerDep, snapshot: Snapshot, path: str) -> Response:
    """The bytes of a file, or a range of them. Whole files and long ranges hold a lease, also until the next file."""
    source, checkpoint, file = ctx.source, snapshot.checkpoint, snapshot.files.get(path)
    if file is None:
        raise _missing("EntryNotFound", f"{checkpoint.id} has no file {path!r}", snapshot.sha)

    def read(offset: int, count: int) -> memoryview:
        if count > PIECE_BYTES or "range" not in request.headers:
            ctx.contents.hold(checkpoint, f"{caller.name}{OF_TOKEN}download")
        return next(file.pieces(source, checkpoint, offset, offset + count), memoryview(b""))

    await ctx.with_store(getattr, file, "version")  # it takes a while, and is kept
    return await streamed(request, ctx, file, read, {"X-Repo-Commit": snapshot.sha})


@router.api_route("/{path:path}", methods=["GET", "HEAD"])
async def other(path: str) -> Response:
    """Whatever else clients ask the Hub for, such as models that are not here."""
    raise _missing("RepoNotFound", f"{path} is not here: HF_ENDPOINT names a daemon in place of the Hub")


def _missing(code: str, text: str, sha: str = "") -> HTTPException:
    """An answer that the clients turn into an exception of their own."""
    message = ascii(text[:500])[1:-1]
    return HTTPException(404, text, {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": sha})


def _opened(ctx: Context, caller: Caller, repository: str, revision: str) -> _Snapshot:
    run = _CODE.sub(lambda code: chr(int(code[1], 16)), repository.removeprefix("runs/"))
    match = _REVISION.fullmatch(revision)
    which, view, item, dtype = match.groups() if match else (revision, "", None, None)
    code = "RepoNotFound"
    try:
        if not caller.sees(run):
            raise NoCheckpoint(Reference(run).missing)
        newest = ctx.catalog.latest(run)
        code = "RevisionNotFound"
        found = _named(ctx.catalog, newest, which)
        files = ctx.contents.folder(found, item or "model", dtype)
    except (NoCheckpoint, BadInput) as error:
        raise _missing(code, error.message) from error
    return _Snapshot(_sha(found) + view, found, files)


def _named(catalog: Catalog, newest: Checkpoint, which: str) -> Checkpoint:
    """The checkpoint that a revision without its view names."""
    run = newest.run
    if which != "main":
        return catalog.find(Reference.parse(f"{run}@{which.removeprefix(f'{run}@')}"))
    healthy = healthiest([newest] if newest.not_finite == 0 else _committed(catalog, run))
    if not healthy:
        raise NoCheckpoint(f"none of the newest checkpoints of run {run!r} is healthy")
    return healthy[0]


def _committed(catalog: Catalog, run: str) -> list[Checkpoint]:
    """The newest checkpoints of the live lineage, newest first."""
    return catalog.newest(run, bodies.MAX_PAGE, State.COMMITTED, State.THINNED)


def _sha(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.step}.{checkpoint.attempt.ulid}"


def _ref(name: str, checkpoint: Checkpoint) -> dict[str, str]:
    return {"name": name, "ref": name, "targetCommit": _sha(checkpoint)}
