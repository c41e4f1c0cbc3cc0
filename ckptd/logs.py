"""Log lines on stderr: time, level, request id, message."""

from __future__ import annotations

import logging
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
"""The request being answered, here and in the threads that work for it."""


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = REQUEST_ID.get()
        return True


def configure(level: str) -> None:
    """Send the logs of this process to stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(_RequestId())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(request_id)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for chatty in ("alembic", "uvicorn", "httpx", "botocore", "aiobotocore", "s3fs", "fsspec"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
