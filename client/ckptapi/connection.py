"""The HTTP connection to a daemon: requests, responses, and errors as CkptError."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from ckptapi import bodies
from ckptstore.errors import DaemonUnavailable, InvalidRequest, Unavailable, error_from_code
from ckptstore.format.decoding import decode_json
from ckptstore.retry import outage_pauses, retry

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_RETRIES = 3
_B = TypeVar("_B", bound=msgspec.Struct)
_T = TypeVar("_T")


class Connection:
    """Connections to one daemon. Use it from any thread, and close it when done.

    Every method raises DaemonUnavailable if the daemon does not respond, or the error that it returned.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: httpx.Timeout = _TIMEOUT,
        retries: int = _RETRIES,
        patience_s: float = 0.0,
        cacert: str | None = None,
    ) -> None:
        """patience_s: reads are retried for this time if the daemon does not respond, which hides its restart.

        cacert: a file with certificates of authorities, instead of CKPTD_CA's or the system's. Raises InvalidRequest if
        it is not.
        """
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout,
            transport=httpx.HTTPTransport(verify=_authorities(self.url, cacert), retries=retries),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def read_past_caches(self) -> None:
        """Bypass the caches of the daemon and of proxies from now on."""
        self._http.headers["Cache-Control"] = "no-cache"

    def _json(self, method: str, path: str, kind: type[_B], **options: Any) -> _B:
        response = self._request(method, path, **options)
        try:
            return decode_json(response.content, kind)
        except msgspec.DecodeError as error:
            raise DaemonUnavailable(
                f"{self.url}{path} returned a response that is not from ckptd: {error}", "Is this the daemon's URL?"
            ) from error

    def _request(
        self, method: str, path: str, body: msgspec.Struct | None = None, timeout: float | None = None, **query: Any
    ) -> httpx.Response:
        """query: parameters; None: not sent."""

        def once() -> httpx.Response:
            with self._responding():
                response = self._http.request(
                    method,
                    path,
                    params={name: value for name, value in query.items() if value is not None},
                    content=msgspec.json.encode(body) if body is not None else None,
                    headers={"Content-Type": "application/json"} if body is not None else {},
                    timeout=httpx.Timeout(timeout, connect=5.0) if timeout else httpx.USE_CLIENT_DEFAULT,
                )
            self._raise_for(response)
            return response

        return self._patiently(once) if method == "GET" else once()

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        """The result of `ask`, retried with growing pauses on Unavailable, for at most `patience_s`."""
        waits = outage_pauses(self._patience_s)
        return retry(ask, Unavailable, waits, unless=is_certificate_error, log_level=logging.WARNING)

    def _raise_for(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        try:
            problem = decode_json(response.read(), bodies.Problem)
        except msgspec.DecodeError:
            where = f"{response.request.method} {response.request.url}"
            raise DaemonUnavailable(
                f"{where} returned {response.status_code}", "Is this the daemon's URL, and is it healthy?"
            ) from None
        raise error_from_code(problem.code, problem.detail, problem.hint)

    @contextmanager
    def _responding(self) -> Iterator[None]:
        """Raises DaemonUnavailable if the connection fails during the block."""
        try:
            yield
        except httpx.HTTPError as error:
            cause = f"{type(error).__name__}: {error}".rstrip(": .")
            remedy = _remedy(self.url, str(error))
            raise DaemonUnavailable(f"ckptd at {self.url} did not respond: {cause}", remedy) from error


def is_certificate_error(error: Exception) -> bool:
    """Whether the daemon's certificate was refused, as it would be again."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _authorities(url: str, cacert: str | None) -> ssl.SSLContext | bool:
    https = url.startswith("https:")
    cacert = cacert or (os.environ.get("CKPTD_CA") if https else None)
    if not cacert:
        return https  # loading the system's takes 30 ms
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:
        raise InvalidRequest(
            f"cannot use the certificates in {cacert}: {error}", "Give a PEM file with the authority's certificate"
        ) from error


def _remedy(url: str, text: str) -> str:
    """The remedy for a connection that failed with this text."""
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return "No known authority signed the certificate for this name. Name its file in CKPTD_CA (ckptctl: --cacert)"
    if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
        return f"The server there does not use TLS: try {url.replace('https://', 'http://', 1)}"
    if "without sending a response" in text:
        return f"If the daemon uses TLS, try {url.replace('http://', 'https://', 1)}"
    if "Name or service not known" in text or "No address associated" in text or "name resolution" in text:
        return "No host has this name: check the URL"
    return "Check that it runs and that the URL is right. Saves and restores also work without it"
