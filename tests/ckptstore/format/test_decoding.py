"""Types are decoded by many threads at once from the first moment on."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: with msgspec.json.decode in the place of decode_json it dies by SIGSEGV.
_PROGRAM = """
import sys, threading
import msgspec
from ckptstore.format.decoding import decode_json

sys.setswitchinterval(1e-6)
for number in range(300):
    inner = msgspec.defstruct("Inner", [(f"field_{n}", int | None, None) for n in range(20)])
    outer = msgspec.defstruct("Outer", [("inners", list[inner]), ("by_name", dict[str, inner])])
    data = b'{"inners": [{"field_7": 1}], "by_name": {"a": {"field_19": 2}}}'
    start = threading.Barrier(4)

    def decode():
        start.wait()
        found = decode_json(data, outer)
        assert found.inners[0].field_7 == 1 and found.by_name["a"].field_19 == 2

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_meet_a_type_for_the_first_time() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
