import pytest

from ckptctl.targets import Target, choose_target
from ckptstore.errors import InvalidRequest
from tests.support.command_line import invoke


def test_exactly_one_target_is_meant() -> None:
    http, store = "http://h:1", "s3://b/p"
    daemon = Target(http, is_daemon=True, token="t")
    assert choose_target(http, None, "t", ()) == daemon
    assert choose_target(None, store, "t", ()) == Target(store, is_daemon=False)
    # The command line wins over the environment, where trainers have both.
    assert choose_target(http, store, "t", {"url"}) == daemon
    assert choose_target(http, store, None, {"store"}) == Target(store, is_daemon=False)
    for explicit in ((), ("url", "store")):
        with pytest.raises(InvalidRequest, match="both"):
            choose_target(http, store, None, explicit)


def test_targets_come_from_the_environment() -> None:
    assert "there is no folder" in invoke("ls", env={"CKPT_STORE": "/nowhere/at/all"}).stderr
    both = {"CKPT_STORE": "/nowhere/at/all", "CKPTD_URL": "http://127.0.0.1:1"}
    assert invoke("ls", env=both).code == 2
    assert "/nowhere/at/all" in invoke("ls", "--store", "/nowhere/at/all", env=both).stderr
