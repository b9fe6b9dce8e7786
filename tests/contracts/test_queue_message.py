"""Messages: decoded when touched, and poison that harms nobody else (spec 1 §3)."""

from __future__ import annotations

import pickle

import pytest

from conquiet import MalformedMessageError, QueueError, QueueMessage
from tests.contracts.flavours import Queue
from tests.contracts.looking import Look

POISON: dict[str, tuple[bytes, ...]] = {
    "another field name": (b"payload", b'{"a":1}'),
    "the name in capitals": (b"DATA", b'{"a":1}'),
    "a second field": (b"data", b'{"a":1}', b"more", b"1"),
    "the field twice": (b"data", b'{"a":1}', b"data", b'{"a":1}'),
    "not JSON": (b"data", b"{a:1}"),
    "empty": (b"data", b""),
    "cut short": (b"data", b'{"a":'),
    "something behind": (b"data", b'{"a":1} {"b":2}'),
    "a JSON array": (b"data", b"[1,2]"),
    "a JSON string": (b"data", b'"text"'),
    "a JSON null": (b"data", b"null"),
    "NaN": (b"data", b'{"a":NaN}'),
    "invalid UTF-8": (b"data", b'{"a":"\xff\xfe"}'),
    "too deep": (b"data", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
}


@pytest.mark.parametrize("fields", POISON.values(), ids=POISON)
async def test_a_malformed_entry_is_an_error_where_its_payload_is_touched_and_nowhere_else(
    fields: tuple[bytes, ...], queue: Queue, look: Look
) -> None:
    """spec 1 §3.1: an entry must be exactly one field "data" with a JSON object; what is not is told as such."""
    before = await queue.enqueue({"n": 1})
    poison = await look.add(*fields)
    after = await queue.enqueue({"n": 2})
    first, bad, last = await queue.read(block_ms=50, count=3)
    assert [(first.id, first.payload), (last.id, last.payload)] == [(before, {"n": 1}), (after, {"n": 2})]
    for _ in range(2):
        with pytest.raises(MalformedMessageError) as caught:
            bad.payload  # noqa: B018
        error = caught.value
        assert isinstance(error, QueueError)
        assert (error.stream, error.id, error.fields) == (look.stream, poison, fields)
        assert poison in str(error)
    assert bad.fields == fields
    await queue.ack(bad)
    assert await look.pending_ids() == [before, after]


async def test_a_malformed_entry_can_be_claimed_and_acknowledged(queue: Queue, rival: Queue, look: Look) -> None:
    """spec 1 §3.1, §5.6: poison is recovered and put away like any other message."""
    poison = await look.add(b"wrong", b"\xff")
    await queue.read(block_ms=50)
    [message] = await rival.claim_stale(min_idle_ms=0)
    assert (message.id, message.raw, message.fields) == (poison, b"", (b"wrong", b"\xff"))
    with pytest.raises(MalformedMessageError):
        message.payload  # noqa: B018
    await rival.ack(message)
    assert await look.pending() == []


async def test_an_entry_of_a_foreign_writer_is_read_if_it_keeps_the_format(queue: Queue, look: Look) -> None:
    """spec 1 §3.1: the format is the contract, not who wrote it: blanks, escapes and large numbers are JSON too."""
    await look.add(b"data", b' { "a" : "\\u00fc" , "n" : 123456789012345678901234567890 } ')
    [message] = await queue.read(block_ms=50)
    assert message.payload == {"a": "ü", "n": 123456789012345678901234567890}


async def test_a_message_is_read_only(queue: Queue) -> None:
    """spec 1 §5.4: a QueueMessage is a record of a delivery; nothing about it can be changed."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    for name in ("stream", "group", "id", "payload", "raw", "fields", "delivery_count", "anything_else"):
        with pytest.raises(AttributeError):
            setattr(message, name, "changed")


async def test_the_payload_is_decoded_once(queue: Queue) -> None:
    """spec 1 §3.2: the payload is one dict, however often it is asked for."""
    await queue.enqueue({"n": 1})
    [message] = await queue.read(block_ms=50)
    assert message.payload is message.payload


async def test_deliveries_of_one_entry_are_equal(queue: Queue, rival: Queue) -> None:
    """spec 1 §2.3: a second delivery is the same message, so that handlers can tell duplicates."""
    await queue.enqueue_many([{"n": 1}, {"n": 1}])
    first, other = await queue.read(block_ms=50, count=2)
    again, _ = await rival.claim_stale(min_idle_ms=0)
    assert (first == again, hash(first) == hash(again), {first, again}) == (True, True, {first})
    assert first != other
    assert first != "a string"
    elsewhere = QueueMessage(first.stream, "another group", first.id, first.fields)
    assert first != elsewhere


async def test_a_message_is_printed_without_its_payload(queue: Queue) -> None:
    """spec 1 §3.2: payloads may hold secrets: what lands in logs is where a message is, not what it says."""
    await queue.enqueue({"password": "hunter2"})
    [message] = await queue.read(block_ms=50)
    assert repr(message) == f"QueueMessage(stream={message.stream!r}, group='group', id={message.id!r})"
    assert "hunter2" not in f"{message} {message!r}"


async def test_a_message_can_be_pickled(queue: Queue, look: Look) -> None:
    """spec 1 §5.4: a message may be handed to another process, poison too, and acknowledged there."""
    await queue.enqueue({"n": 1})
    await look.add(b"wrong", b"1")
    good, bad = await queue.read(block_ms=50, count=2)
    assert good.payload == {"n": 1}
    for message in (good, bad):
        copy = pickle.loads(pickle.dumps(message))
        assert (copy, copy.fields, copy.delivery_count) == (message, message.fields, 1)
        await queue.ack(copy)
    assert pickle.loads(pickle.dumps(good)).payload == {"n": 1}
    with pytest.raises(MalformedMessageError) as caught:
        pickle.loads(pickle.dumps(bad)).payload  # noqa: B018
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.id, error.fields, str(error)) == (bad.id, bad.fields, str(caught.value))
    assert await look.pending() == []
