"""Forms and the cookies of the pages.

A form carries what a cookie of its browser says (double submit). The cookie is SameSite=Strict, so that a form of
another site comes without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hmac import compare_digest
from urllib.parse import parse_qs

from starlette.requests import Request

from ckptstore.errors import Forbidden, InvalidRequest

VISIT = "ckptd_visit"
"""Where the request keeps its visit."""
_MAX_FORM_BYTES = 8 << 10
_MAX_FIELDS = 16


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a browser."""

    secret: str
    """What forms must carry."""
    logged_in: bool
    now: float


def cookie(name: str, value: str, max_age_s: int, https: bool) -> tuple[bytes, bytes]:
    """A header that sets a cookie which no script and no other site gets."""
    secure = "; Secure" if https else ""
    text = f"{name}={value}; Max-Age={max_age_s}; Path=/; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", text.encode("ascii")


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form of ours. Raises InvalidRequest, or Forbidden for one that another site has sent."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_FORM_BYTES:
            raise InvalidRequest(f"the form is larger than {_MAX_FORM_BYTES} bytes", "Is this a token?")
    try:
        fields = parse_qs(data.decode("ascii"), max_num_fields=_MAX_FIELDS, keep_blank_values=True)
    except ValueError as error:
        raise InvalidRequest(f"the form cannot be read: {error}", "Send it from the page") from error
    visit: Visit = request.scope[VISIT]
    found = {name: values[0] for name, values in fields.items()}
    if not compare_digest(found.get("csrf", "").encode(), visit.secret.encode()):
        raise Forbidden(
            "the form was not sent from a page of ours", "Load the page again; does the browser keep cookies?"
        )
    return found
