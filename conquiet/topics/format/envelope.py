"""A message as a stream entry: which fields it has, how they are written and how they are read.

The fields stand here and in ``lua/entry.lua``, which appends many messages in one call, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from conquiet.errors import ConfigError, MalformedMessageError, PayloadError
from conquiet.kit import codec as json
from conquiet.kit import rules
from conquiet.message import DATA, Message, Outgoing
from conquiet.topics.codec import Codec

__all__ = [
    "LARGEST",
    "WITH_HEADERS",
    "WITH_ID",
    "WITH_KEY",
    "command_of",
    "command_start",
    "fields_of",
    "fill",
    "fill_blank",
    "now_ms",
    "only_group",
    "text_of",
    "too_large",
]

LARGEST: Final = 512 << 20  # Redis' own limit for one value
_RESERVED: Final = "partitionId"
WITH_KEY: Final = 1
WITH_HEADERS: Final = 2
WITH_ID: Final = 4
"""What a row has beside its payload, as ``lua/entry.lua`` is told: the sum of these."""


def now_ms() -> bytes:
    """The time of sending, as entries hold it."""
    return b"%d" % (time.time() * 1000)


def command_start(stream: str, has_key: bool) -> bytes:
    """The beginning of an ``XADD`` of a plain message, with or without a key: the same for each, so packed once."""
    key = stream.encode()
    words = 9 if has_key else 7
    return b"*%d\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$1\r\n*\r\n$7\r\npayload\r\n" % (words, len(key), key)


def command_of(start: bytes, payload: bytes, now: bytes, key: bytes | None) -> bytes:
    """The ``XADD`` of a plain message that begins with ``start``: three times as fast as packing it whole."""
    if key is None:
        return b"%b$%d\r\n%b\r\n$9\r\ntimestamp\r\n$%d\r\n%b\r\n" % (start, len(payload), payload, len(now), now)
    full = (start, len(payload), payload, len(now), now, len(key), key)
    return b"%b$%d\r\n%b\r\n$9\r\ntimestamp\r\n$%d\r\n%b\r\n$3\r\nkey\r\n$%d\r\n%b\r\n" % full


def fields_of(message: Outgoing, codec: Codec, legacy: bool = False) -> list[bytes | str | int]:
    """The entry's fields and values in turn. Refuses whatever would not come back as it was given."""
    payload = codec.encode(message.payload)
    if len(payload) > LARGEST:
        raise too_large(payload)
    if legacy:
        return [DATA, _legacy(message, payload)]
    fields: list[bytes | str | int] = [b"payload", payload, b"timestamp", now_ms()]
    if message.key is not None:
        fields += (b"key", text_of("key", message.key))
    if message.headers is not None and (headers := _headers(message.headers)):
        fields += (b"headers", headers)
    if message.message_id is not None:
        fields += (b"messageId", rules.text("message_id", message.message_id))
    if message.max_retries is not None:
        fields += (b"maxRetries", rules.integer("max_retries", message.max_retries, least=0))
    if codec.name != "json":
        fields += (b"codec", codec.name)
    return fields


def too_large(payload: bytes) -> PayloadError:
    """What is said of a payload that Redis would not take."""
    return PayloadError("$", f"is {len(payload)} bytes encoded, but Redis takes {LARGEST} at most")


def fill(message: Message, id: str, entry: Sequence[bytes], codec: Codec) -> bool:
    """Make ``message`` the one that an entry holds; ``MalformedMessageError`` if it holds none.

    Whether it is as conquiet's own producers write it, with nothing special.
    """
    fill_blank(message, id, entry)
    try:
        count = len(entry)
        is_short = (count == 6 and entry[4] == b"key") or count == 4
        if is_short and entry[0] == b"payload" and entry[2] == b"timestamp":
            message.payload = codec.decode(entry[1])
            if count == 6:
                message.key = entry[5].decode()
            return True
        _fill_any(message, codec)
    except Exception as error:
        raise MalformedMessageError(message.topic, id, entry, str(error) or type(error).__name__) from error
    return False


def fill_blank(message: Message, id: str, entry: Sequence[bytes]) -> None:
    """Make ``message`` stand for an entry whatever that holds."""
    message.id = id
    message._entry = entry
    message.key = message.payload = message.max_retries = message.replayed_from = None
    message._fields = message._headers = None
    message.retry_count = 0


def only_group(raw: Sequence[bytes]) -> bytes | None:
    """The group that an entry is addressed to; ``None`` if it is for all."""
    if b"onlyGroup" not in raw:
        return None
    return dict(zip(raw[::2], raw[1::2], strict=True)).get(b"onlyGroup")


def _fill_any(message: Message, codec: Codec) -> None:
    fields = message.fields
    message.payload = _payload(fields, codec)
    key = fields.get(b"key")
    if key is not None:
        message.key = key.decode()
    message.retry_count = int(fields.get(b"retryCount", b"0"))
    limit = fields.get(b"maxRetries")
    if limit is not None:
        message.max_retries = int(limit)
    if b"headers" in fields:
        _check_headers(message.headers)
    replayed = fields.get(b"replayedFrom")
    if replayed is not None:
        message.replayed_from = replayed.decode()


def _payload(fields: Mapping[bytes, bytes], codec: Codec) -> Any:
    data = fields.get(b"payload")
    if data is None:
        if len(fields) != 1 or DATA not in fields:
            raise ValueError(f"its fields are {list(fields)}, with no payload among them")
        data = fields[DATA]
    written = fields.get(b"codec")
    if written is not None and written.decode() != codec.name:
        raise ValueError(f"it was written with the codec {written!r}, but is read with {codec.name!r}")
    return codec.decode(data)


def _legacy(message: Outgoing, payload: bytes) -> bytes:
    for what in ("key", "headers", "message_id", "max_retries"):
        if getattr(message, what) not in (None, {}):
            raise ConfigError(f"{what} cannot be carried by a legacy stream, whose entries have the one field 'data'")
    if not isinstance(message.payload, dict):
        raise PayloadError("$", f"must be a dict in a legacy stream, not {type(message.payload).__name__}")
    return payload


def text_of(what: str, value: object) -> bytes:
    """``value`` in UTF-8, if it is a string that has one."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be a string, not {value!r}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} must be valid Unicode, not {value!r}") from None


def _headers(headers: object) -> bytes:
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers must be a mapping of strings to strings, not {headers!r}")
    plain = dict(cast("Mapping[Any, Any]", headers))
    _check_headers(plain)
    if _RESERVED in plain:
        raise ConfigError(f"the header {_RESERVED!r} is set on delivery and cannot be sent")
    try:
        return json.encode_object(plain) if plain else b""
    except PayloadError:
        raise ConfigError(f"headers must be valid Unicode, not {headers!r}") from None


def _check_headers(headers: Mapping[Any, Any]) -> None:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"headers must be strings, not {name!r}: {value!r}")
