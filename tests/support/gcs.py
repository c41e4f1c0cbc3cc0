"""Google Cloud Storage for tests: the requests that gcsfs makes by its JSON interface, and ours by its XML interface,
with their documented replies.

They are on cloud.google.com/storage/docs: json_api/v1/objects, request-preconditions, performing-resumable-uploads;
xml-api: put-object-multipart, post-object-multipart, post-object-complete, delete-multipart, get-bucket-uploads.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import threading
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from google_crc32c import value as crc32c

from tests.support.seaweed import BUCKET

_RESUME, _CANCELLED = 308, 499
_LEAST_PART = 5 << 20
ZONAL = "zonal"
"""A bucket whose objects are appendable: they are written by gRPC alone."""


@dataclass(frozen=True)
class _Object:
    data: bytes
    generation: int
    updated: str
    md5: str | None
    """None of an upload in parts, as there."""


@dataclass
class _Upload:
    """A resumable one. Its object is there when it is complete."""

    name: str
    create: bool
    data: bytearray = field(default_factory=bytearray)
    done: bool = False


@dataclass
class _Multipart:
    """An upload in parts."""

    name: str
    initiated: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """ETag and bytes, by number."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, page: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = page
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, _Upload] = {}
        self.multiparts: dict[str, _Multipart] = {}
        self.generations = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""


@contextmanager
def running_service(page: int = 4) -> Iterator[str]:
    """A service with one empty bucket, on a free port of this machine; yields its URL.

    page: names in a page of a listing. The service may return fewer than asked for, here nearly always.
    """
    server = _Server(page)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="gcs")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            self._decide(body)
        self._write(*self._reply)  # requests are sent beside each other, as slowly as their clients receive

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the names that http.server calls

    def _decide(self, body: bytes) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        found = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?", url.path)
        if found is None:
            bucket, _, name = unquote(url.path.removeprefix("/")).partition("/")
            options = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            return self._xml(bucket, name, options, body)
        if unquote(found[2]) == ZONAL:
            return self._send(400, {"error": {"code": 400, "message": "Objects of a zonal bucket are appendable."}})
        if unquote(found[2]) != BUCKET:
            return self._send(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
        if found[1] == "/upload":
            return self._upload(query, body)
        if found[3] is not None:
            return self._object(unquote(found[3]), media=query.get("alt") == "media")
        return self._list(query) if url.path.endswith("/o") else self._send(200, {"name": BUCKET})

    def _object(self, name: str, media: bool) -> None:
        found = self.server.objects.get(name)
        if found is None:
            return self._send(404, {"error": {"code": 404, "message": f"No such object: {BUCKET}/{name}"}})
        if self.command == "DELETE":
            del self.server.objects[name]
            return self._send(204, None)
        if not media:
            return self._send(200, _described(name, found))
        headers = {"ETag": f'"{found.generation}"', "Last-Modified": formatdate(usegmt=True)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, found.data, headers)
        begin, end = int(wanted[1]), min(int(wanted[2] or len(found.data)) + 1, len(found.data))
        if begin >= len(found.data):
            return self._send(416, {"error": {"code": 416, "message": "Request range not satisfiable"}})
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(found.data)}"
        return self._send(206, memoryview(found.data)[begin:end], headers)

    def _xml(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
        upload = self.server.multiparts.get(query.get("uploadId", ""))
        if bucket == ZONAL:
            return self._xml_error(400, "InvalidArgument")
        if bucket != BUCKET:
            return self._xml_error(404, "NoSuchBucket")
        if not name:
            assert "uploads" in query, self.path
            return self._list_uploads(query)
        if self.command == "GET":
            return self._object(name, media=True) if name in self.server.objects else self._xml_error(404, "NoSuchKey")
        if "uploads" in query:
            id = uuid.uuid4().hex
            self.server.multiparts[id] = _Multipart(name, _now())
            return self._send(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        if upload is None:
            return self._xml_error(404, "NoSuchUpload")
        if self.command == "DELETE":
            del self.server.multiparts[query["uploadId"]]
            return self._send(204, None)
        if self.command == "PUT":
            return self._part(upload, int(query["partNumber"]), body)
        return self._complete(query["uploadId"], upload, body.decode())

    def _part(self, upload: _Multipart, number: int, body: bytes) -> None:
        claimed = re.search(r"crc32c=([^,]+)", self.headers.get("x-goog-hash", ""))
        if claimed is not None and int.from_bytes(base64.b64decode(claimed[1]), "big") != crc32c(body):
            return self._xml_error(400, "BadDigest")
        assert 1 <= number <= 10_000
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        upload.parts[number] = etag, body
        return self._send(200, b"", {"ETag": etag})

    def _complete(self, id: str, upload: _Multipart, listed: str) -> None:
        wanted = [
            tuple(re.findall(rf"<{name}>([^<]*)</{name}>", part)[0] for name in ("PartNumber", "ETag"))
            for part in listed.split("<Part>")[1:]
        ]
        parts = [upload.parts.get(int(number), ("", b"")) for number, _ in wanted]
        numbers = [int(number) for number, _ in wanted]
        if not wanted or [etag for etag, _ in parts] != [html.unescape(etag) for _, etag in wanted]:
            return self._xml_error(400, "InvalidPart")
        if numbers != sorted(numbers):
            return self._xml_error(400, "InvalidPartOrder")
        if any(len(data) < _LEAST_PART for _, data in parts[:-1]):
            return self._xml_error(400, "EntityTooSmall")
        del self.server.multiparts[id]
        self._keep(upload.name, b"".join(data for _, data in parts), None)
        etag = f"<CompleteMultipartUploadResult><ETag>{id}</ETag></CompleteMultipartUploadResult>"
        return self._send(200, etag.encode())

    def _list_uploads(self, query: dict[str, str]) -> None:
        found = "".join(
            f"<Upload><Key>{upload.name}</Key><UploadId>{id}</UploadId><Initiated>{upload.initiated}</Initiated></Upload>"
            for id, upload in self.server.multiparts.items()
            if upload.name.startswith(query.get("prefix", ""))
        )
        self._send(200, f"<ListMultipartUploadsResult>{found}</ListMultipartUploadsResult>".encode())

    def _xml_error(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter, after = (query.get(name, "") for name in ("prefix", "delimiter", "pageToken"))
        entries = set()
        for name in self.server.objects:
            if name.startswith(prefix):
                folder, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                entries.add(prefix + folder + cut if cut else name)
        ordered = sorted(entries)
        begin = bisect_right(ordered, after)
        page = ordered[begin : begin + self.server.page]
        reply: dict[str, Any] = {"kind": "storage#objects"}
        if items := [_described(name, self.server.objects[name]) for name in page if name in self.server.objects]:
            reply["items"] = items
        if prefixes := [name for name in page if name not in self.server.objects]:
            reply["prefixes"] = prefixes
        if begin + len(page) < len(ordered):
            reply["nextPageToken"] = page[-1]
        self._send(200, reply)

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        create = query.get("ifGenerationMatch") == "0"
        if "upload_id" in query:
            return self._resume(query["upload_id"], body)
        if query["uploadType"] == "multipart":
            line = b"--" + self.headers["Content-Type"].partition('boundary="')[2].rstrip('"').encode()
            end = b"\r\n" if body.startswith(line + b"\r\n") else b"\n"
            _, described, media = body[: body.rindex(end + line + b"--")].split(line, 2)
            name = json.loads(described.partition(end * 2)[2].removesuffix(end))["name"]
            return self._store(name, media.partition(end * 2)[2], create)
        name = json.loads(body)["name"]
        if create and name in self.server.objects:
            return self._refuse()
        id = uuid.uuid4().hex
        self.server.uploads[id] = _Upload(name, create)
        return self._send(200, b"", {"Location": f"http://{self.headers['Host']}{self.path}&upload_id={id}"})

    def _resume(self, id: str, body: bytes) -> None:
        upload = self.server.uploads.get(id)
        if upload is None:
            return self._send(404, {"error": {"code": 404, "message": "No such upload"}})
        if self.command == "DELETE":
            del self.server.uploads[id]
            return self._send(_CANCELLED, b"")
        if upload.done:
            return self._send(200, _described(upload.name, self.server.objects[upload.name]))
        begin, total = re.fullmatch(r"bytes (?:\*|(\d+)-\d+)/(\d+|\*)", self.headers["Content-Range"]).groups()  # type: ignore[union-attr]
        if begin is not None:
            assert int(begin) <= len(upload.data), "bytes are missing between two chunks"
            upload.data[int(begin) :] = body
        if total in (None, "*") or int(total) > len(upload.data):
            assert not len(body) % (256 << 10), "chunks before the last one are multiples of 256 KiB"
            return self._send(_RESUME, b"", {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})
        upload.done = True
        return self._store(upload.name, bytes(upload.data), upload.create)

    def _store(self, name: str, data: bytes, create: bool) -> None:
        if create and name in self.server.objects:
            return self._refuse()
        self._keep(name, data, base64.b64encode(hashlib.md5(data).digest()).decode())
        return self._send(200, _described(name, self.server.objects[name]))

    def _keep(self, name: str, data: bytes, md5: str | None) -> None:
        self.server.generations += 1
        self.server.objects[name] = _Object(data, self.server.generations, _now(), md5)

    def _refuse(self) -> None:
        message = "At least one of the pre-conditions you specified did not hold."
        self._send(412, {"error": {"code": 412, "message": message}})

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._reply = status, body, headers or {}

    def _write(self, status: int, body: Any, headers: dict[str, str]) -> None:
        data = b"" if body is None else body if isinstance(body, (bytes, memoryview)) else json.dumps(body).encode()
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if body is not None:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Silent."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _described(name: str, found: _Object) -> dict[str, str]:
    return {
        "kind": "storage#object", "name": name, "bucket": BUCKET, "generation": str(found.generation),
        "metageneration": "1", "size": str(len(found.data)), "updated": found.updated, "timeCreated": found.updated,
    } | ({"md5Hash": found.md5} if found.md5 else {})  # fmt: skip
