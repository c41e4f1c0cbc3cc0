"""Forms and the cookies of the pages.

CSRF protection is double submit: a form repeats the value of a cookie. The cookie is SameSite=Strict, so that forms of
other sites are sent without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hmac import compare_digest
from urllib.parse import parse_qs

from starlette.requests import Request

from ckptstore.errors import Forbidden, InvalidRequest

VISIT = "ckptd_visit"
"""The key of the visit in the ASGI scope."""
_MAX_FORM_BYTES = 8 << 10
_MAX_FIELDS = 16


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a browser."""

    secret: str
    """The CSRF token that forms must contain."""
    logged_in: bool
    now: float


def cookie(name: str, value: str, max_age_s: int, https: bool) -> tuple[bytes, bytes]:
    """A Set-Cookie header for a cookie that scripts and other sites cannot read."""
    secure = "; Secure" if https else ""
    text = f"{name}={value}; Max-Age={max_age_s}; Path=/; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", text.encode("ascii")


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a submitted form. Raises InvalidRequest, or Forbidden if another site sent the form."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_FORM_BYTES:
            raise InvalidRequest(f"the form is larger than {_MAX_FORM_BYTES} bytes", "Check that you pasted a token")
    try:
        fields = parse_qs(data.decode("ascii"), max_num_fields=_MAX_FIELDS, keep_blank_values=True)
    except ValueError as error:
        raise InvalidRequest(f"the form cannot be read: {error}", "Submit the form from its page") from error
    visit: Visit = request.scope[VISIT]
    found = {name: values[0] for name, values in fields.items()}
    if not compare_digest(found.get("csrf", "").encode(), visit.secret.encode()):
        raise Forbidden(
            "the form was not submitted from a page of this daemon", "Reload the page, and allow cookies for it"
        )
    return found
