"""Payloads as bytes: JSON, bytes as they are, and values of one type."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib
import importlib.util
import pickle
from typing import Any

import msgspec
import pytest

from conquiet import Broker, BytesCodec, ConfigError, JsonCodec, PayloadError, SubscribeOptions, TypedCodec
from conquiet.wire.keys import Keys
from tests.rigs.asking import ask
from tests.rigs.waiting import eventually


class Order(msgspec.Struct):
    id: int
    when: dt.datetime | None = None


@dataclasses.dataclass
class Line:
    sku: str
    count: int = 1


@dataclasses.dataclass
class Basket:
    lines: list[Line]


VALUES: list[tuple[Any, Any]] = [
    (Order, Order(1, dt.datetime(2024, 5, 6, tzinfo=dt.UTC))),
    (Basket, Basket([Line("a"), Line("b", 3)])),
    (dict[str, int], {"a": 1}),
    (list[Order], [Order(1), Order(2)]),
    (Order | None, None),
    (set[int], {1, 2}),
]


@pytest.mark.parametrize("payload", [{"a": [1, None, "x"]}, [1], "text", 5, 1.5, True, None, {}])
def test_json_carries_any_json_value(payload: Any) -> None:
    codec = JsonCodec()
    assert codec.decode(codec.encode(payload)) == payload
    assert codec.name == "json"


def test_bytes_are_stored_as_they_are() -> None:
    codec = BytesCodec()
    assert codec.decode(codec.encode(b"\x00\xff")) == b"\x00\xff"
    assert codec.name == "bytes"


@pytest.mark.parametrize("payload", ["text", bytearray(b"a"), None, 5])
def test_what_is_not_bytes_is_refused(payload: Any) -> None:
    with pytest.raises(PayloadError, match=f"must be bytes, not {type(payload).__name__}"):
        BytesCodec().encode(payload)


@pytest.mark.parametrize(("type_", "value"), VALUES)
def test_values_of_a_type_come_back_as_such(type_: Any, value: Any) -> None:
    codec = TypedCodec(type_)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("type_", "value"),
    [(Order, {"id": 1}), (Order, Order("one")), (Line, Order(1)), (float, float("nan")), (Order, object())],  # type: ignore[arg-type]
)
def test_a_value_that_would_not_come_back_is_refused(type_: Any, value: Any) -> None:
    with pytest.raises(PayloadError):
        TypedCodec(type_).encode(value)


@pytest.mark.parametrize("type_", [5, "Order", dict[int, list[object]] | set[str] | Order | Line])
def test_a_type_that_has_no_codec_is_refused_at_once(type_: Any) -> None:
    with pytest.raises(ConfigError, match="no codec for"):
        TypedCodec(type_)


def test_what_does_not_fit_the_type_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="Expected `int`"):
        TypedCodec(Order).decode(b'{"id":"one"}')


@pytest.mark.skipif(importlib.util.find_spec("pydantic") is None, reason="pydantic is not installed")
def test_pydantic_models_come_back_as_such() -> None:
    base: Any = importlib.import_module("pydantic").BaseModel
    model: Any = type("Model", (base,), {"__annotations__": {"id": int}})
    codec = TypedCodec(model)
    assert codec.decode(codec.encode(model(id=1))) == model(id=1)
    with pytest.raises(PayloadError):
        codec.encode({"id": 1})


class _Model:
    """What a codec needs of a pydantic model."""

    def __init__(self, id: int) -> None:
        self.id = id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and other.id == self.id

    __hash__ = None  # type: ignore[assignment]

    def model_dump_json(self) -> str:
        return f'{{"id":{self.id}}}'

    @classmethod
    def model_validate_json(cls, data: bytes) -> _Model:
        return cls(msgspec.json.decode(data)["id"])


def test_models_with_pydantics_methods_are_written_by_these() -> None:
    codec = TypedCodec(_Model)
    assert codec.encode(_Model(7)) == b'{"id":7}'
    assert codec.decode(b'{"id":7}') == _Model(7)
    with pytest.raises(PayloadError):
        codec.encode(5)


@pytest.mark.parametrize("codec", [JsonCodec(), BytesCodec()])
def test_codecs_pickle(codec: Any) -> None:
    assert pickle.loads(pickle.dumps(codec)) == codec


def test_a_typed_codec_pickles() -> None:
    """A facade is closed over by Spark closures together with its codec."""
    codec = pickle.loads(pickle.dumps(TypedCodec(Order)))
    assert codec.decode(codec.encode(Order(1))) == Order(1)


@pytest.mark.any_server
@pytest.mark.parametrize(
    ("codec", "payload", "written"),
    [
        (JsonCodec(), [1, {"a": None}], b'[1,{"a":null}]'),
        (BytesCodec(), b"\x80\x00", b"\x80\x00"),
        (TypedCodec(Order), Order(1), b'{"id":1,"when":null}'),
        (TypedCodec(Line), Line("a"), b'{"sku":"a","count":1}'),
    ],
)
async def test_a_payload_goes_through_a_topic(url: str, keys: Keys, codec: Any, payload: Any, written: bytes) -> None:
    async with Broker(url, namespace=keys.namespace, codec=codec) as broker:
        await broker.create_topic("orders")
        await broker.send("orders", payload)
        async with broker.consume("orders", group="g") as messages:
            message = await messages.next(timeout=20)
            assert message is not None
            assert message.payload == payload
            assert (type(message.payload), message.raw) == (type(payload), written)
            await message.ack()


@pytest.mark.any_server
async def test_a_payload_of_another_codec_is_a_dead_letter_and_not_a_guess(url: str, keys: Keys) -> None:
    options = SubscribeOptions(batch_size=1)
    async with (
        Broker(url, namespace=keys.namespace, codec=BytesCodec()) as raw,
        Broker(url, namespace=keys.namespace) as broker,
    ):
        await broker.create_topic("orders")
        await raw.send("orders", b"{}")
        await broker.send("orders", {"id": 2})
        async with broker.consume("orders", group="g", options=options) as messages:
            message = await messages.next(timeout=20)
            assert message is not None
            assert message.payload == {"id": 2}
            await message.ack()
            await eventually(lambda: _has_one(url, keys.dead_letters("orders")), "the dead letter")
        [letter] = await broker.admin.dead_letters("orders")
        assert (letter.reason, letter.raw) == ("malformed", b"{}")


async def _has_one(url: str, stream: str) -> bool:
    return bool(await ask(url, "XLEN", stream) == 1)
