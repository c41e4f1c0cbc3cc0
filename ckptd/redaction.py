"""Removes secrets from logs and from printed settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")
_SECRET_VARIABLE = re.compile(r"SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIAL|ACCOUNT_KEY")
_SHORTEST = 6
"""Minimum length of a redacted value; shorter values occur in log lines by chance."""


def mask_passwords(text: str) -> str:
    """The text with the passwords in its URLs replaced."""
    return _URL_PASSWORD.sub(rf"\1{MASK}@", text)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values of the variables whose names mark them as secret."""
    return [value for name, value in environment.items() if _SECRET_VARIABLE.search(name.upper())]


class Redactor:
    """Replaces passwords in URLs, ckptd tokens, and the given values. Any thread may use it."""

    def __init__(self, secrets: Iterable[str]) -> None:
        literal = sorted((re.escape(value) for value in set(secrets) if len(value) >= _SHORTEST), key=len, reverse=True)
        self._secret = re.compile("|".join([r"ckptd_[A-Za-z0-9.-]+_[0-9a-f]{64}", *literal]))

    def __call__(self, text: str) -> str:
        """The text without secrets."""
        return mask_passwords(self._secret.sub(MASK, text))
