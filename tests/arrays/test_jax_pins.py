"""What we use of JAX beyond its public interfaces does what we think. A new JAX that changes it fails here."""

from __future__ import annotations

import subprocess
import sys

from tests.support.ports import free_port

SCRIPT = """
import sys
import jax
from ckpt.ranks.world import JaxStore, jax_job

assert jax_job() is None
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
rank, size, client = jax_job()
assert (rank, size) == (0, 1), (rank, size)
store = JaxStore(client).below("run")
assert not store.check(["a"])
store.set("a", b"\\x00one")
store.set("a", "two")
assert store.get("a") == b"two"
assert store.check(["a"]) and not store.check(["a", "b"])
assert not JaxStore(client).check(["a"]) and JaxStore(client).check(["run/a"])
assert (store.add("n", 0), store.add("n", 3), store.add("n", 0)) == (0, 3, 3)
assert store.compare_set("a", "one", "three") == b"two"
assert store.compare_set("a", "two", "three") == b"three" == store.get("a")
assert store.compare_set("new", "", "four") == b"four"
store.delete_key("a")
store.delete_key("never there")
assert not store.check(["a"])
array = jax.numpy.arange(4.0)
assert array.format.layout.major_to_minor == (0,)
assert array.committed is False
print("pinned")
jax.distributed.shutdown()
assert jax_job() is None
"""


def test_pinned() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(free_port())], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["pinned"], done.stderr
    assert done.returncode == 0, done.stderr
