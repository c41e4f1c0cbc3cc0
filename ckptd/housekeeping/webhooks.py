"""Webhooks: events, posted to the URLs in the settings and to no others.

Each daemon posts only its own events, so that several daemons on one database post each event once. Events that are
not delivered when the daemon exits are not posted later; GET /v1/events still returns them.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape

import httpx
import msgspec

from ckptapi.bodies import EventBody, EventKind
from ckptd.metrics import Metrics
from ckptstore.clock import Clock
from ckptstore.errors import InvalidRequest
from ckptstore.retry import pauses

_LOG = logging.getLogger(__name__)
KINDS = frozenset(
    (EventKind.COMMITTED, EventKind.NOT_FINITE, EventKind.CORRUPT, EventKind.RESTORE_ENDED, EventKind.PRUNED)
)
QUEUED = 1000
TRIES = 6
_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.5
_AGAIN = frozenset((408, 425, 429))
_MIN_SECRET = 16
_CHAT = "chat+"


class Webhooks:
    """Posts events. `offer` is for any thread and never blocks."""

    def __init__(
        self,
        urls: Sequence[str],
        secret: str,
        metrics: Metrics,
        clock: Clock,
        pause: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        """pause: waits for an event, or N seconds. Raises InvalidRequest."""
        for url in urls:
            check_url(url)
        if len(secret) < _MIN_SECRET and not all(url.startswith(_CHAT) for url in urls):
            raise InvalidRequest(
                f"webhook_secret has fewer than {_MIN_SECRET} characters",
                "Set CKPTD_WEBHOOK_SECRET: receivers authenticate posts with it",
            )
        self._hooks = [_Hook(url, secret, metrics, clock, pause) for url in urls]

    def offer(self, events: Sequence[EventBody]) -> None:
        """Queue events for posting."""
        wanted = [event for event in events if event.kind in KINDS]
        for hook in self._hooks:
            hook.offer(wanted)

    def start(self) -> None:
        """Start the posting threads."""
        for hook in self._hooks:
            hook.thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop after the current post, waiting at most `timeout_s` seconds per webhook."""
        for hook in self._hooks:
            hook.stop()
        for hook in self._hooks:
            hook.thread.join(timeout_s)


def check_url(url: str) -> None:
    """Raises InvalidRequest unless a webhook can be posted there."""
    try:
        parsed = httpx.URL(url.removeprefix(_CHAT))
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"webhook {url!r} is not a URL: {error}", "Write https://host/path") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(f"webhook {url!r} is not an HTTP URL", "Write https://host/path")


def sentence(event: EventBody) -> str:
    """An event for people, as Slack and Mattermost take it."""
    what = (event.checkpoint or "").rpartition(".")[0] or event.run or "the store"
    facts = ", ".join(f"{name} {value}" for name, value in event.detail.items() if isinstance(value, (str, int, float)))
    return escape(f"{event.kind.replace('_', ' ')}: {what}" + f" ({facts})" * bool(facts), quote=False)


def sign(secret: str, at: int, body: bytes) -> str:
    """The value of the header X-Ckptd-Signature: the time, and an HMAC-SHA256 of the time and the body."""
    digest = hmac.new(secret.encode(), b"%d." % at + body, sha256).hexdigest()
    return f"t={at},v1={digest}"


@dataclass(repr=False)
class _Hook:
    _target: str
    """The URL; with `chat+` before it, for Slack or Mattermost."""
    _secret: str
    _metrics: Metrics
    _clock: Clock
    _pause: Callable[[threading.Event, float], object]

    def __post_init__(self) -> None:
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._loop, name="webhook", daemon=True)
        self._url = self._target.removeprefix(_CHAT)
        self._host = httpx.URL(self._url).host
        self._queue: deque[EventBody] = deque(maxlen=QUEUED)
        self._changed = threading.Condition()

    def stop(self) -> None:
        with self._changed:
            self.stopping.set()
            self._changed.notify()

    def offer(self, events: Sequence[EventBody]) -> None:
        with self._changed:
            too_many = max(0, len(self._queue) + len(events) - QUEUED)
            self._queue.extend(events)
            self._changed.notify()
        if too_many:
            self._metrics.webhooks.labels("dropped").inc(too_many)
            _LOG.warning("dropped the %d oldest events for webhook %s: it is too slow", too_many, self._host)

    def _loop(self) -> None:
        # Do not follow redirects: they lead to addresses that are not configured.
        with httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False) as client:
            while not self.stopping.is_set():
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self.stopping.is_set())
                    event = self._queue.popleft() if self._queue else None
                if event is not None:
                    self._deliver(client, event)

    def _deliver(self, client: httpx.Client, event: EventBody) -> None:
        for pause in [*pauses(_FIRST_PAUSE_S, tries=TRIES), None]:
            problem, again = self._post(client, event)
            if not again or pause is None or self.stopping.is_set():
                break
            self._pause(self.stopping, pause)
        self._metrics.webhooks.labels("failed" if problem else "delivered").inc()
        if problem:
            _LOG.warning("webhook %s did not accept event %d: %s", self._host, event.id, problem)

    def _post(self, client: httpx.Client, event: EventBody) -> tuple[str, bool]:
        """The problem (empty on success), and whether to try again."""
        body = msgspec.json.encode({"text": sentence(event)} if self._url != self._target else event)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "ckptd",
            "X-Ckptd-Event": event.kind,
            "X-Ckptd-Delivery": str(event.id),
            "X-Ckptd-Signature": sign(self._secret, int(self._clock()), body),
        }
        try:
            # Stream the response and do not read it: its size must not cost memory.
            with client.stream("POST", self._url, content=body, headers=headers) as response:
                status = response.status_code
        except httpx.HTTPError as error:
            return type(error).__name__, True
        if 200 <= status < 300:
            return "", False
        return f"status {status}", status >= 500 or status in _AGAIN
