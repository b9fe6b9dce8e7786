"""A message as an entry: exactly which fields, and the same message out of them."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conquiet import ConfigError, MalformedMessageError, Message, Outgoing, PayloadError
from conquiet.topics.codec import BYTES, JSON
from conquiet.topics.format import envelope
from conquiet.topics.format.envelope import fields_of, fill, only_group
from conquiet.wire.streams import pack

WORDS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
HEADERS = st.dictionaries(WORDS.filter(lambda name: name != "partitionId"), WORDS, max_size=4)


def stored(message: Outgoing, **options: Any) -> dict[bytes, bytes]:
    """The entry as Redis would hold it."""
    words = [_bytes(word) for word in fields_of(message, options.pop("codec", JSON), **options)]
    return dict(zip(words[::2], words[1::2], strict=True))


def _bytes(word: bytes | str | int) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def read(fields: Mapping[bytes, bytes], codec: Any = JSON, id: str = "1700000000000-3") -> Message:
    message = Message()
    message.topic, message.partition, message.group, message.epoch = "orders", 2, "billing", 7
    fill(message, id, [word for pair in fields.items() for word in pair], codec)
    return message


# --- what is written ------------------------------------------------------------------------------------------


def test_the_plainest_message_has_two_fields() -> None:
    before = time.time()
    fields = stored(Outgoing({"id": 1}))
    assert list(fields) == [b"payload", b"timestamp"]
    assert fields[b"payload"] == b'{"id":1}'
    assert int(before * 1000) <= int(fields[b"timestamp"]) <= time.time() * 1000


def test_every_other_field_is_there_when_it_was_set() -> None:
    fields = stored(Outgoing(5, key="Grüße", headers={"trace": "abc"}, message_id="m-1", max_retries=0))
    del fields[b"timestamp"]
    assert fields == {
        b"payload": b"5",
        b"key": "Grüße".encode(),
        b"headers": b'{"trace":"abc"}',
        b"messageId": b"m-1",
        b"maxRetries": b"0",
    }


def test_no_headers_and_no_key_leave_no_trace_but_an_empty_key_does() -> None:
    assert list(stored(Outgoing(1, headers={}))) == [b"payload", b"timestamp"]
    assert stored(Outgoing(1, key=""))[b"key"] == b""


def test_a_payload_that_is_not_json_names_its_codec() -> None:
    assert stored(Outgoing(b"\x00\xff"), codec=BYTES)[b"codec"] == b"bytes"
    assert stored(Outgoing(b"\x00\xff"), codec=BYTES)[b"payload"] == b"\x00\xff"


def test_a_legacy_entry_is_the_one_field_of_a_queue() -> None:
    assert stored(Outgoing({"id": 1}), legacy=True) == {b"data": b'{"id":1}'}


@pytest.mark.parametrize(
    "more",
    [{"key": "a"}, {"headers": {"a": "b"}}, {"message_id": "m"}, {"max_retries": 1}],
    ids=lambda more: next(iter(more)),
)
def test_a_legacy_entry_can_carry_nothing_else(more: dict[str, Any]) -> None:
    [what] = more
    with pytest.raises(ConfigError, match=f"^{what} cannot be carried by a legacy stream"):
        fields_of(Outgoing({}, **more), JSON, legacy=True)


@pytest.mark.parametrize("payload", [[1], "text", None, 5])
def test_a_legacy_payload_is_a_dict(payload: object) -> None:
    with pytest.raises(PayloadError, match="must be a dict in a legacy stream"):
        fields_of(Outgoing(payload), JSON, legacy=True)


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ({"a": [1, {"b": float("nan")}]}, "$.a[1].b"),
        ({1: 2}, "$"),
        ((1, 2), "$"),
        ([1, (2, 3)], "$[1]"),
        (b"bytes", "$"),
        ({"big": 2**64}, "$.big"),
        ("\ud800", "$"),
        ({"when": dt.datetime(2024, 1, 1)}, "$.when"),
    ],
)
def test_a_payload_that_json_would_change_is_refused_with_its_place(payload: object, path: str) -> None:
    with pytest.raises(PayloadError) as caught:
        fields_of(Outgoing(payload), JSON)
    assert caught.value.path == path


def test_a_payload_over_the_servers_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "LARGEST", 10)
    fields_of(Outgoing("x" * 8), JSON)
    with pytest.raises(PayloadError, match="is 11 bytes encoded, but Redis takes 10 at most"):
        fields_of(Outgoing("x" * 9), JSON)


def test_the_limit_is_the_servers_own() -> None:
    assert envelope.LARGEST == 512 * 1024 * 1024


@pytest.mark.parametrize("key", [5, b"a", ["a"], True, "\ud800"])
def test_a_key_is_text(key: Any) -> None:
    with pytest.raises(ConfigError, match=r"^key must be"):
        fields_of(Outgoing(1, key=key), JSON)


@pytest.mark.parametrize("headers", [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"b"}, ["a"], "a=b", 5, [], 0, ""])
def test_headers_are_a_mapping_of_strings(headers: Any) -> None:
    with pytest.raises(ConfigError, match=r"^headers must be"):
        fields_of(Outgoing(1, headers=headers), JSON)


@pytest.mark.parametrize("headers", [{"\ud800": "a"}, {"a": "\ud800"}])
def test_headers_are_valid_unicode(headers: Any) -> None:
    """Said of the headers: the payload is all right."""
    with pytest.raises(ConfigError, match="headers") as caught:
        fields_of(Outgoing(1, headers=headers), JSON)
    assert not isinstance(caught.value, PayloadError)


def test_the_header_that_is_set_on_delivery_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="the header 'partitionId' is set on delivery"):
        fields_of(Outgoing(1, headers={"partitionId": "3"}), JSON)


def test_headers_may_be_any_mapping() -> None:
    assert stored(Outgoing(1, headers=MappingProxyType({"a": "b"})))[b"headers"] == b'{"a":"b"}'


@pytest.mark.parametrize("id", ["", 5, b"m", "\ud800"])
def test_a_message_id_is_text(id: Any) -> None:
    with pytest.raises(ConfigError, match=r"^message_id must be"):
        fields_of(Outgoing(1, message_id=id), JSON)


@pytest.mark.parametrize("most", [-1, 1.5, True, "3"])
def test_max_retries_is_a_number_of_times(most: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_retries must be an integer of at least 0"):
        fields_of(Outgoing(1, max_retries=most), JSON)


# --- there and back -------------------------------------------------------------------------------------------


@given(VALUES, st.none() | WORDS, st.none() | HEADERS, st.none() | WORDS.filter(bool), st.none() | st.integers(0, 9))
def test_whatever_was_sent_comes_back(
    payload: Any, key: str | None, headers: dict[str, str] | None, id: str | None, most: int | None
) -> None:
    message = read(stored(Outgoing(payload, key, headers, id, most)))
    assert message.payload == payload
    assert type(message.payload) is type(payload)
    assert (message.key, message.message_id, message.max_retries) == (key, id, most)
    assert message.headers == {**(headers or {}), "partitionId": "2"}


@given(VALUES)
def test_the_stored_payload_is_json_for_everybody(payload: Any) -> None:
    assert json.loads(stored(Outgoing(payload))[b"payload"]) == payload


@given(st.binary())
def test_bytes_come_back_as_they_are(payload: bytes) -> None:
    message = read(stored(Outgoing(payload), codec=BYTES), BYTES)
    assert (message.payload, message.raw) == (payload, payload)


def test_a_message_knows_where_it_is() -> None:
    message = read({b"payload": b"1", b"timestamp": b"1700000000123"})
    assert (message.id, message.topic, message.partition) == ("1700000000000-3", "orders", 2)
    assert (message.group, message.epoch, message.retry_count) == ("billing", 7, 0)
    assert message.timestamp == dt.datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=dt.UTC)
    assert (message.original_id, message.replayed_from) == ("2/1700000000000-3", None)
    assert (message.key, message.message_id, message.max_retries) == (None, None, None)


def test_what_retry_and_replay_add_is_read() -> None:
    fields = {b"payload": b"1", b"retryCount": b"2", b"originalMessageId": b"0/5-1", b"replayedFrom": b"1/6-1"}
    message = read(fields)
    assert (message.retry_count, message.original_id, message.replayed_from) == (2, "0/5-1", "1/6-1")


def test_each_of_these_is_read_also_where_a_foreign_writer_gave_nothing_else() -> None:
    assert read({b"payload": b"1", b"retryCount": b"2"}).retry_count == 2
    assert read({b"payload": b"1", b"maxRetries": b"2"}).max_retries == 2
    assert read({b"payload": b"1", b"key": b"k", b"maxRetries": b"2"}).max_retries == 2
    assert read({b"payload": b"1", b"replayedFrom": b"1/6-1"}).replayed_from == "1/6-1"


@pytest.mark.parametrize("fields", [{b"payload": b"1"}, {b"payload": b"1", b"timestamp": b"yesterday"}])
def test_the_time_is_the_entrys_own_where_the_producer_gave_none(fields: dict[bytes, bytes]) -> None:
    assert read(fields).timestamp_ms == 1700000000000


def test_an_entry_of_a_queue_can_be_read() -> None:
    message = read({b"data": b'{"id":1}'})
    assert (message.payload, message.key, message.raw) == ({"id": 1}, None, b'{"id":1}')


def test_fields_that_nobody_knows_do_no_harm() -> None:
    assert read({b"payload": b"1", b"traceparent": b"00-1-2", b"x": b"\xff"}).payload == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no payload"),
        ({b"body": b"1"}, "no payload"),
        ({b"data": b"1", b"more": b"2"}, "no payload"),
        ({b"payload": b"{"}, "truncated"),
        ({b"payload": b"\xff"}, ""),
        ({b"payload": b"[" * 100_000}, ""),
        ({b"payload": b"1", b"key": b"\xff"}, "utf-8"),
        ({b"payload": b"1", b"retryCount": b"many"}, "many"),
        ({b"payload": b"1", b"maxRetries": b"1.5"}, "1.5"),
        ({b"payload": b"1", b"headers": b"[1"}, ""),
        ({b"payload": b"1", b"headers": b'{"a":1}'}, "headers must be strings"),
        ({b"payload": b"1", b"headers": b"5"}, ""),
        ({b"payload": b"1", b"headers": b'[["a","b"]]'}, ""),
        ({b"payload": b"1", b"codec": b"bytes"}, "written with the codec b'bytes', but is read with 'json'"),
        ({b"payload": b"1", b"replayedFrom": b"\xff"}, "utf-8"),
    ],
)
def test_what_is_no_message_is_malformed(fields: dict[bytes, bytes], reason: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        read(fields)
    assert reason in caught.value.reason
    assert caught.value.id == "1700000000000-3"


def test_who_reads_as_bytes_gets_json_entries_refused_only_if_they_say_otherwise() -> None:
    assert read({b"payload": b"{}"}, BYTES).payload == b"{}"


@pytest.mark.parametrize(
    ("raw", "group"),
    [
        ([b"payload", b"1"], None),
        ([b"payload", b"1", b"onlyGroup", b"billing"], b"billing"),
        ([b"payload", b"onlyGroup"], None),
        ([b"onlyGroup", b"", b"payload", b"onlyGroup"], b""),
    ],
)
def test_an_entry_may_be_for_one_group(raw: Sequence[bytes], group: bytes | None) -> None:
    assert only_group(raw) == group


@given(HEADERS, st.none() | WORDS)
def test_fields_are_what_the_wire_takes(headers: dict[str, str], key: str | None) -> None:
    words = fields_of(Outgoing(1, key=key, headers=headers), JSON)
    assert pack("XADD", "s", "*", *words).startswith(b"*%d\r\n" % (3 + len(words)))
