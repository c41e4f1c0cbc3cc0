"""One daemon over HTTP: requests, answers, and errors that became one of ours."""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
import msgspec

from ckptstore import wire
from ckptstore.errors import CkptError, DaemonUnavailable, error_from_code

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_RETRIES = 3
_B = TypeVar("_B", bound=msgspec.Struct)


class Connection:
    """Connections to one daemon; use it from any thread, close it when done.

    Every method raises DaemonUnavailable when no answer comes, or the error the daemon names.
    """

    def __init__(
        self, url: str, token: str | None = None, timeout: httpx.Timeout = _TIMEOUT, retries: int = _RETRIES
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            transport=httpx.HTTPTransport(retries=retries),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def read_past_caches(self) -> None:
        """From now on be answered by the store itself, past the cache of the daemon and of any proxy."""
        self._http.headers["Cache-Control"] = "no-cache"

    def _json(self, method: str, path: str, kind: type[_B], **options: Any) -> _B:
        response = self._request(method, path, **options)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise DaemonUnavailable(
                f"{self.url}{path} gave an answer that is not ckptd's: {error}", "Is this the daemon's URL?"
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None = None,
        params: dict[str, str | int] | None = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        content = msgspec.json.encode(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if body is not None else {}
        wait = httpx.Timeout(timeout, connect=5.0) if timeout else self._timeout
        try:
            response = self._http.request(method, path, params=params, content=content, headers=headers, timeout=wait)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        self._raise_for(response)
        return response

    def _raise_for(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        response.read()
        raise self._error(response)

    def _error(self, response: httpx.Response) -> CkptError:
        try:
            problem = msgspec.json.decode(response.content, type=wire.Problem)
        except msgspec.DecodeError:
            where = f"{response.request.method} {response.request.url}"
            return DaemonUnavailable(
                f"{where} answered {response.status_code}", "Is this the daemon's URL, and is it healthy?"
            )
        return error_from_code(problem.code, problem.detail, problem.hint)

    def _unavailable(self, error: httpx.HTTPError) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"ckptd at {self.url} did not answer: {type(error).__name__}: {error}",
            "Check that it runs and that the URL is right; saves and restores also work straight from the store",
        )
