"""Errors are for people and logs: whatever strangers wrote, they stay short."""

from __future__ import annotations

import pickle

import pytest

from conquiet import ConfigError, MalformedMessageError, PayloadError, QueueConfig, QueueError, RedisStreamsQueue
from conquiet.kit import codec
from conquiet.message import QueueMessage
from tests.rigs.asking import ask

MUCH = 5_000_000


@pytest.mark.parametrize("fields", [[b"x" * MUCH, b""], [b"\x00" * 2, b""] * MUCH], ids=["a long name", "many names"])
def test_a_malformed_entry_makes_no_long_error(fields: list[bytes]) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        assert QueueMessage("s", "g", "1-1", fields).payload
    assert len(str(caught.value)) < 4000
    assert len(caught.value.reason) < 4000
    assert "its fields are" in str(caught.value)


@pytest.mark.any_server
async def test_nor_does_one_that_came_from_a_server(url: str, config: QueueConfig) -> None:
    async with RedisStreamsQueue.connect(url, config) as queue:
        await ask(url, "XADD", config.stream_key, "*", "x" * MUCH, "1")
        [message] = await queue.read(1000)
        with pytest.raises(MalformedMessageError) as caught:
            assert message.payload
        assert len(repr(caught.value)) < 4000
        await queue.ack(message)


def test_a_payload_that_cannot_be_sent_makes_no_long_error() -> None:
    with pytest.raises(PayloadError) as caught:
        codec.encode({"x" * MUCH: b"no JSON"})
    assert len(str(caught.value)) < 8000


@pytest.mark.parametrize("kind", [QueueError, ConfigError])
def test_the_end_of_a_long_error_is_kept(kind: type[Exception]) -> None:
    error = kind("begin " + "x" * MUCH + " end")
    assert len(str(error)) < 4000
    assert str(error).startswith("begin")
    assert str(error).endswith("end")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
