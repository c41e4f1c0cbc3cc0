"""Logs to stderr, as text or JSON, with the request id and without secrets."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

from ckptd.redaction import Redactor

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the current request, also in its worker threads."""
FIELDS = "ckptd_fields"
"""`extra={FIELDS: {...}}` adds fields to the JSON object; the text format ignores them."""
_CHATTY = ("alembic", "uvicorn", "httpx", "botocore", "aiobotocore", "s3fs", "fsspec", "opentelemetry", "urllib3")


class _TextFormatter(logging.Formatter):
    def __init__(self, redact: Redactor) -> None:
        super().__init__("%(asctime)s %(levelname)s %(request_id)s %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        record.request_id = REQUEST_ID.get()
        return self._redact(super().format(record))


class _JsonFormatter(_TextFormatter):
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
    converter = time.gmtime  # type: ignore[assignment]

    def format(self, record: logging.LogRecord) -> str:
        # Redact before encoding as JSON: an escape sequence would hide a secret from the redactor.
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": REQUEST_ID.get(),
            "message": self._redact(record.getMessage()),
            **{
                name: self._redact(value) if isinstance(value, str) else value
                for name, value in getattr(record, FIELDS, {}).items()
            },
        }
        if record.exc_info:
            line["exception"] = self._redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: str, redact: Redactor) -> None:
    """Send the logs of this process to stderr. form: "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter(redact) if form == "json" else _TextFormatter(redact))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
