from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from ckpt.saver.messages import Abort, Channel, Command, Forget, Report, SaveProgress, Slot, Stop
from ckptstore.commits.generations import Session
from ckptstore.names import Attempt, new_ulid
from tests.ckpt.saver.attempts import new_attempt

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_in_order_and_whole(pair: Pair) -> None:
    sent = [SaveProgress(number, number * 10) for number in range(5000)]

    def send() -> None:
        for message in sent:
            pair[0].send(message)

    sender = threading.Thread(target=send)
    sender.start()
    assert [pair[1].receive(Report) for _ in sent] == sent
    sender.join()


def test_descriptors_stay_with_their_messages_among_others(pair: Pair) -> None:
    for number, fd in enumerate([os.memfd_create(f"test-{number}") for number in range(3)]):
        os.write(fd, str(number).encode())
        pair[0].send(Forget(number))
        pair[0].send(Slot(number, 100 + number), fds=[fd])
        os.close(fd)
    pair[0].send(Stop())
    for number in range(3):
        assert pair[1].receive(Command) == Forget(number)
        assert pair[1].receive(Command) == Slot(number, 100 + number)
        received = pair[1].take_fd()
        assert os.pread(received, 10, 0) == str(number).encode()
        os.close(received)
    assert pair[1].receive(Command) == Stop()


def test_the_end_of_the_stream_is_none_also_in_the_middle_of_a_message(pair: Pair) -> None:
    pair[0].send(SaveProgress(1, 2))
    pair[0]._sock.sendall(b"\x10\x00\x00")
    pair[0].close()
    assert pair[1].receive(Report) == SaveProgress(1, 2)
    assert pair[1].receive(Report) is None
    with pytest.raises(BrokenPipeError):
        pair[1].send(Stop())


def test_attempts_stay_typed(pair: Pair) -> None:
    session = Session(new_ulid(0), Attempt(3, new_ulid(0), generation=2))
    sent = Abort(replace(new_attempt(7), session=session), "out of memory")
    pair[0].send(sent)
    assert pair[1].receive(Command) == sent
