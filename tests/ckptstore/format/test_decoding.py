"""Types are decoded by many threads at once from the first moment on."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: with the functions of msgspec in the place of ours it dies by SIGSEGV.
_PROGRAM = """
import sys, threading
import msgspec
from ckptstore.format.decoding import convert, decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
for number in range(300):
    inner = msgspec.defstruct("Inner", [(f"field_{n}", int | None, None) for n in range(20)])
    outer = msgspec.defstruct("Outer", [("inners", list[inner]), ("by_name", dict[str, inner])])
    data = b'{"inners": [{"field_7": 1}], "by_name": {"a": {"field_19": 2}}}'
    plain = msgspec.json.decode(data)
    packed = msgspec.msgpack.encode(plain)
    ways = {
        "decode_json": lambda kind: decode_json(data, kind),
        "decode_msgpack": lambda kind: decode_msgpack(packed, kind),
        "convert": lambda kind: convert(plain, kind),
    }
    way, start = ways[sys.argv[1]], threading.Barrier(4)

    def decode():
        start.wait()
        found = way(outer)
        assert found.inners[0].field_7 == 1 and found.by_name["a"].field_19 == 2

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("way", ["decode_json", "decode_msgpack", "convert"])
def test_threads_meet_a_type_for_the_first_time(way: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, way], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
