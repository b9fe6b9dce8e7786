"""How payloads become bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import msgspec

from conquiet.errors import ConfigError, PayloadError
from conquiet.kit import codec

__all__ = ["BYTES", "JSON", "BytesCodec", "Codec", "JsonCodec", "TypedCodec"]


class Codec(Protocol):
    """Payloads to bytes and back. What ``decode`` raises makes the entry a dead letter."""

    @property
    def name(self) -> str:
        """Written into entries that are not JSON, so that a reader can tell."""
        ...

    def encode(self, payload: Any) -> bytes:
        """The bytes to store; ``PayloadError`` if they would not come back equal."""
        ...

    def decode(self, data: bytes) -> Any:
        """The payload in ``data``."""
        ...


@dataclass(frozen=True, slots=True)
class JsonCodec:
    """Any JSON value, refused before it is sent if JSON would change it."""

    name: str = "json"

    def encode(self, payload: Any) -> bytes:
        """``payload`` as UTF-8 JSON."""
        return codec.encode_object(payload) if type(payload) is dict else codec.encode(payload)  # pyright: ignore[reportUnknownArgumentType]

    def decode(self, data: bytes) -> Any:
        """The JSON value."""
        return codec.decode(data)


@dataclass(frozen=True, slots=True)
class BytesCodec:
    """Bytes as they are."""

    name: str = "bytes"

    def encode(self, payload: Any) -> bytes:
        """``payload`` itself, which must be bytes."""
        if not isinstance(payload, bytes):
            raise PayloadError("$", f"must be bytes, not {type(payload).__name__}")
        return payload

    def decode(self, data: bytes) -> Any:
        """``data`` itself."""
        return data


class TypedCodec:
    """Values of one type as JSON: anything that msgspec knows (dataclasses, Structs, ...), or a pydantic model."""

    name = "json"

    def __init__(self, type_: Any) -> None:
        self._type = type_
        if hasattr(type_, "model_validate_json"):
            self._write: Callable[[Any], bytes] = _pydantic_bytes
            self._read: Callable[[bytes], Any] = type_.model_validate_json
            return
        try:
            self._read = cast("Any", msgspec.json.Decoder(type_)).decode
        except TypeError as error:
            raise ConfigError(f"no codec for {type_!r}: {error}") from error
        self._write = msgspec.json.Encoder().encode

    def __reduce__(self) -> tuple[type[TypedCodec], tuple[Any]]:
        return TypedCodec, (self._type,)

    def encode(self, payload: Any) -> bytes:
        """``payload`` as JSON; it must come back equal."""
        try:
            data = self._write(payload)
            if self._read(data) == payload:
                return data
        except Exception as error:
            raise PayloadError("$", str(error)) from error
        raise PayloadError("$", "would not come back equal to what was sent")

    def decode(self, data: bytes) -> Any:
        """The value, checked against the type."""
        return self._read(data)


def _pydantic_bytes(model: Any) -> bytes:
    return cast("bytes", model.model_dump_json().encode())


JSON: Final = JsonCodec()
BYTES: Final = BytesCodec()
