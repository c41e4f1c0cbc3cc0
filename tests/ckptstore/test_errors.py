from __future__ import annotations

import pytest

from ckptstore import errors
from ckptstore.errors import CkptError

ERRORS = sorted(
    (cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, CkptError)),
    key=lambda cls: cls.code,
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_every_error_is_explained(error: type[CkptError]) -> None:
    assert ((error.__doc__ or "").strip()[-1], vars(error)["remedy"][-1]) == (".", ".")


def test_error_codes_are_unique() -> None:
    assert len({error.code for error in ERRORS}) == len(ERRORS)
