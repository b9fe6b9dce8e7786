"""The payloads of a topic as a struct column, and as text in ``_corrupt`` where they do not fit its schema.

The rules are those of Spark's ``from_json`` in its mode PERMISSIVE with partial results: nothing that a message
holds ever fails a job. A field that is missing is null, one that the schema does not name is ignored, one that
does not fit is null and makes the record corrupt while its other fields stay. In an array or a map one value that
does not fit makes the whole of it null. A payload that is no JSON object is a struct of nulls, and corrupt; an
empty one is null, and not corrupt. Every field is nullable, whatever the schema says. The time zone is UTC.

What differs from Spark, always on the side of ``_corrupt``:

- JSON is what RFC 8259 says: single quotes, a bare ``NaN``, text behind the object, half a surrogate are corrupt.
- Bytes that are not UTF-8 are corrupt; ``_corrupt`` shows them as replacement characters.
- Integers never wrap: in a BYTE, Spark reads 128 to 255 as negative numbers; so it does with far away TIMESTAMPs.
- Dates and times are of the years 1 to 9999, and never a number of days in a text nor a time of today.
- Zones are ``Z``, ``UTC``, ``GMT`` and offsets; Spark knows the names of regions as well.
- BINARY is one piece of Base64 without white space in it.

And what differs otherwise:

- A number, an object or an array in a STRING field is its own text, without white space; Spark writes numbers and
  escapes anew (``1.50`` as ``1.5``).
- Of a key that is there twice only the last value is looked at, also in a map; Spark looks at all.
- Jackson's limits are not there: numbers of more than 1000 digits are numbers.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Annotated, Any, Final, cast

import msgspec
import pyarrow
from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from conquiet.errors import ConfigError
from conquiet.spark import ddl, moments

__all__ = ["PayloadParser", "schema_of"]

pa: Final[Any] = pyarrow  # which comes without types


def schema_of(text: str) -> StructType:
    """The schema that the option ``schema`` holds: DDL, or the JSON of a ``StructType``. Needs no JVM.

    Every field of it is nullable, and CHAR and VARCHAR are STRING: what ``PayloadParser`` delivers.
    """
    if not text.strip():
        raise ConfigError("schema: is empty, but it has to name the fields of the payload")
    struct = _from_json(text) if text.lstrip().startswith("{") else ddl.parse(text)
    return PayloadParser(struct).schema


def _from_json(text: str) -> StructType:
    try:
        value = json.loads(text)
        if value.get("type") != "struct":
            raise ConfigError(f"schema: the JSON has to be that of a struct, not of {value.get('type')!r}")
        return StructType.fromJson(value)
    except KeyError as error:
        raise ConfigError(f"schema: the JSON of a type lacks {error}: {text!r}") from error
    except (ValueError, TypeError, AttributeError, PySparkException) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"schema: is not the JSON of a StructType: {error}") from error


class PayloadParser:
    """Makes of payloads the columns of ``schema``; a ``ConfigError`` names the field whose type JSON cannot carry."""

    def __init__(self, schema: StructType) -> None:
        self._root = _Struct(schema, "")
        self._decode = _decoder(type(self._root.empty))  # a payload that is ``null`` does not fit

    def __reduce__(self) -> tuple[type[PayloadParser], tuple[StructType]]:
        return type(self), (self.schema,)  # what it is made of cannot be pickled; Spark pickles whoever holds it

    @property
    def schema(self) -> StructType:
        """The type of the struct column: the schema with every field nullable, CHAR and VARCHAR as STRING."""
        return cast("StructType", self._root.spark)

    def columns(self, payloads: Sequence[bytes | None]) -> tuple[Any, Any]:
        """The Arrow array of the structs, and that of the texts that did not fit: null where all is well."""
        records: list[Any] = []
        corrupt: list[str | None] = [None] * len(payloads)
        decode = self._decode
        for place, payload in enumerate(payloads):
            if payload is None:
                records.append(None)
                continue
            try:
                if not payload.isascii():
                    payload.decode()
                records.append(decode(payload))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                record, fits = self._lenient(payload)
                records.append(record)
                if not fits:
                    corrupt[place] = payload.decode("utf-8", "replace")
        return self._root.array(records), pa.array(corrupt, pa.string())

    def _lenient(self, payload: bytes) -> tuple[Any, bool]:
        """The record of a payload that is not simply right, and whether it fits all the same."""
        if not payload.strip(_SPACE):
            return None, True
        try:
            payload.decode()
            record, fits = self._root.lenient(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._root.empty, False
        return (self._root.empty, False) if record is None else (record, fits)


# --- the types ---------------------------------------------------------------------------------------------------

_SPACE: Final = b" \t\r\n"
_PIECES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _AnyValue(type):
    """The metaclass of types that msgspec hands to a converter and whose results it does not question."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def _converted(convert: Callable[[Any], Any]) -> Any:
    """A type for msgspec: what JSON has there goes through ``convert``, which raises ``ValueError`` if it does not fit.

    Numbers with a point or an exponent come as ``Decimal``: nothing of their text is lost.
    """
    return _AnyValue("Converted", (), {"convert": staticmethod(convert)})


def _decoder(hint: Any) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(hint, dec_hook=_convert, float_hook=Decimal).decode


def _convert(kind: Any, value: object) -> Any:
    return kind.convert(value)


class _Column:
    """One type of the schema.

    ``hint`` is the type as msgspec decodes it, which is the whole work for a record that fits. ``lenient`` takes the
    JSON of one value apart where it does not: the value, and whether all of it fitted; a ``DecodeError`` where
    nothing of it can be kept. ``array`` makes of the values of a column its Arrow array.
    """

    def __init__(self, spark: DataType, arrow: Any, hint: Any) -> None:
        self.spark = spark
        self.arrow: Any = arrow
        self.hint: Any = hint | None
        self.decode = _decoder(self.hint)

    def lenient(self, raw: Any) -> tuple[Any, bool]:
        return self.decode(raw), True

    def array(self, values: list[Any]) -> Any:
        return pa.array(values, self.arrow)


class _Text(_Column):
    def lenient(self, raw: Any) -> tuple[Any, bool]:
        text = bytes(raw)
        if text.startswith((b'"', b"null")):
            return self.decode(text), True
        return msgspec.json.format(text, indent=-1).decode(), True


class _Float(_Column):
    _NAMES: Final = {
        "NaN": float("nan"),
        "Infinity": float("inf"),
        "+Infinity": float("inf"),
        "+INF": float("inf"),
        "-Infinity": float("-inf"),
        "-INF": float("-inf"),
    }

    def lenient(self, raw: Any) -> tuple[Any, bool]:
        text = bytes(raw).decode()
        if text.startswith('"') and text[1:-1] in self._NAMES:
            return self._NAMES[text[1:-1]], True
        # Out of the range of a float: infinite, as in Java.
        return (float(text) if text[0] in "-0123456789" else self.decode(raw)), True


class _Struct(_Column):
    def __init__(self, spark: StructType, path: str) -> None:
        names = [field.name for field in spark.fields]
        _check_names(names, path)
        self._children = [_column(field.dataType, f"{path}{field.name}") for field in spark.fields]
        self._members = {
            name: (f"f{i}", child) for i, (name, child) in enumerate(zip(names, self._children, strict=True))
        }
        self._fields = [pa.field(name, child.arrow) for name, child in zip(names, self._children, strict=True)]
        self._record = msgspec.defstruct(
            "Record",
            [(slot, child.hint, None) for slot, child in self._members.values()],
            rename={slot: name for name, (slot, _) in self._members.items()},
            gc=False,
        )
        self.empty = self._record()
        nullable = [
            StructField(field.name, child.spark, True, field.metadata)
            for field, child in zip(spark.fields, self._children, strict=True)
        ]
        super().__init__(StructType(nullable), pa.struct(self._fields), self._record)

    def lenient(self, raw: Any) -> tuple[Any, bool]:
        if bytes(raw) == b"null":
            return None, True
        found = _MEMBERS.decode(raw)
        record = self._record()
        fits = True
        for name, piece in found.items():
            if name not in self._members:
                continue
            slot, child = self._members[name]
            try:
                value, fitted = child.lenient(piece)
                setattr(record, slot, value)
            except msgspec.DecodeError:
                fitted = False
            fits = fits and fitted
        return record, fits

    def array(self, values: list[Any]) -> Any:
        holes = None in values
        records = [self.empty if value is None else value for value in values] if holes else values
        columns = [child.array([getattr(r, slot) for r in records]) for slot, child in self._members.values()]
        mask = pa.array([value is None for value in values]) if holes else None
        return pa.StructArray.from_arrays(columns, fields=self._fields, mask=mask)


class _List(_Column):
    def __init__(self, spark: ArrayType, path: str) -> None:
        self._element = _column(spark.elementType, f"{path}.element")
        arrow = pa.list_(pa.field("element", self._element.arrow))
        super().__init__(ArrayType(self._element.spark, True), arrow, types.GenericAlias(list, (self._element.hint,)))

    def lenient(self, raw: Any) -> tuple[Any, bool]:
        if bytes(raw) == b"null":
            return None, True
        pairs = [self._element.lenient(piece) for piece in _PIECES.decode(raw)]
        return [value for value, _ in pairs], all(fits for _, fits in pairs)

    def array(self, values: list[Any]) -> Any:
        elements = [element for value in values if value is not None for element in value]
        return pa.ListArray.from_arrays(_offsets(values), self._element.array(elements), type=self.arrow)


class _Map(_Column):
    def __init__(self, spark: MapType, path: str) -> None:
        self._key = _column(spark.keyType, f"{path}.key")
        if not isinstance(self._key.spark, StringType):
            raise ConfigError(f"schema: the keys of the map {path!r} have to be STRING: JSON has no others")
        self._value = _column(spark.valueType, f"{path}.value")
        arrow = pa.map_(pa.field("key", pa.string(), nullable=False), pa.field("value", self._value.arrow))
        super().__init__(
            MapType(self._key.spark, self._value.spark, True), arrow, types.GenericAlias(dict, (str, self._value.hint))
        )

    def lenient(self, raw: Any) -> tuple[Any, bool]:
        if bytes(raw) == b"null":
            return None, True
        pairs = {key: self._value.lenient(piece) for key, piece in _MEMBERS.decode(raw).items()}
        return {key: value for key, (value, _) in pairs.items()}, all(fits for _, fits in pairs.values())

    def array(self, values: list[Any]) -> Any:
        keys = [key for value in values if value is not None for key in value]
        items = [item for value in values if value is not None for item in value.values()]
        keys_array = pa.array(keys, pa.string())
        return pa.MapArray.from_arrays(_offsets(values), keys_array, self._value.array(items), type=self.arrow)


def _offsets(values: list[Any]) -> Any:
    """Where each value begins, null for null, and the end."""
    offsets: list[int | None] = []
    end = 0
    for value in values:
        offsets.append(None if value is None else end)
        end += len(value) if value else 0
    return pa.array([*offsets, end], pa.int32())


def _check_names(names: list[str], path: str) -> None:
    where = f"the struct {path[:-1]!r}" if path else "the payload"
    if not names:
        raise ConfigError(f"schema: {where} has no fields")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"schema: {where} has the field {name!r} twice")
        if re.search(r'["\\\x00-\x1f]', name):
            raise ConfigError(f"schema: the name {path + name!r} holds a quote, a backslash or a control character")


# --- from JSON to values -----------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def _scaled(kind: DecimalType) -> Callable[[Any], Decimal]:
    """Rounds half up to the scale; refuses what then has more digits than the precision."""
    unit = Decimal(1).scaleb(-kind.scale)
    context = Context(prec=kind.precision, rounding=ROUND_HALF_UP, traps=[InvalidOperation])

    def scaled(value: Any) -> Decimal:
        if isinstance(value, str):
            value = value.replace(",", "")
            if not _NUMBER.fullmatch(value):
                raise ValueError("no number")
        elif isinstance(value, bool) or not isinstance(value, (int, Decimal)):
            raise ValueError("no number")
        try:
            return Decimal(value).quantize(unit, context=context)
        except InvalidOperation as error:
            raise ValueError("too many digits") from error

    return scaled


def _within(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]


_PLAIN: Final[dict[type[DataType], tuple[Any, Any]]] = {
    BinaryType: (pa.binary(), bytes),
    BooleanType: (pa.bool_(), bool),
    ByteType: (pa.int8(), _within(8)),
    DateType: (pa.date32(), _converted(moments.days)),
    IntegerType: (pa.int32(), _within(32)),
    LongType: (pa.int64(), _within(64)),
    ShortType: (pa.int16(), _within(16)),
    TimestampNTZType: (pa.timestamp("us"), _converted(moments.local_micros)),
    TimestampType: (pa.timestamp("us", tz="UTC"), _converted(moments.micros)),
}
_FLOATS: Final[dict[type[DataType], Any]] = {DoubleType: pa.float64(), FloatType: pa.float32()}


def _column(spark: DataType, path: str) -> _Column:
    if isinstance(spark, StructType):
        return _Struct(spark, f"{path}.")
    if isinstance(spark, ArrayType):
        return _List(spark, path)
    if isinstance(spark, MapType):
        return _Map(spark, path)
    if isinstance(spark, (StringType, CharType, VarcharType)):
        return _Text(spark if isinstance(spark, StringType) else StringType(), pa.string(), str)
    if isinstance(spark, DecimalType):
        return _Column(spark, pa.decimal128(spark.precision, spark.scale), _converted(_scaled(spark)))
    if type(spark) in _FLOATS:
        return _Float(spark, _FLOATS[type(spark)], float)
    if type(spark) in _PLAIN:
        return _Column(spark, *_PLAIN[type(spark)])
    raise ConfigError(f"schema: the field {path!r} is of the type {spark.simpleString()}, which a payload cannot have")
