"""The key-value store of `jax.distributed`, with the interface of torch's stores. Loaded where JAX runs in processes.

JAX has no public interface to it. What is used of its private one is pinned by tests/arrays/test_jax_pins.py.
"""

from __future__ import annotations

import sys
from typing import Any

_NOT_FOUND = "NOT_FOUND"
_PATIENCE_MS = 60_000


class JaxStore:
    """Keys below a prefix. For any thread. Raises ConnectionError if the coordinator does not answer."""

    def __init__(self, client: Any, prefix: str = "") -> None:
        self.client = client
        self._prefix = prefix

    def below(self, prefix: str) -> JaxStore:
        """The same store with a longer prefix."""
        return JaxStore(self.client, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value, or replace it."""
        data = value.encode() if isinstance(value, str) else value
        self._ask(self.client.key_value_set_bytes, self._prefix + key, data, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return bytes(self._ask(self.client.blocking_key_value_get_bytes, self._prefix + key, _PATIENCE_MS))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys have values."""
        return all(self._find(key) is not None for key in keys)

    def delete_key(self, key: str) -> None:
        """Delete a value, if there is one."""
        self._ask(self.client.key_value_delete, self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; returns the sum."""
        return int(self._ask(self.client.key_value_increment, self._prefix + key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it is as expected; returns the value there is then.

        Not atomic: of two processes that do so at the same time, either may win.
        """
        if (found := self._find(key)) is not None and found != expected.encode():
            return found
        self.set(key, desired)
        return desired.encode()

    def _find(self, key: str) -> bytes | None:
        try:
            return bytes(self.client.key_value_try_get_bytes(self._prefix + key))
        except RuntimeError as error:  # JaxRuntimeError is one, and has no code
            if str(error).startswith(_NOT_FOUND):
                return None
            raise ConnectionError(str(error)) from error

    def _ask(self, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


def jax_job() -> tuple[int, int, Any] | None:
    """This process's number, the number of processes, and the client of the coordinator; None outside of a job."""
    distributed = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    if state is None or state.client is None:
        return None
    return state.process_id, state.num_processes, state.client
