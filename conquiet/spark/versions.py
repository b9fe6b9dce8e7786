"""What PySpark's versions from 4.0 to 4.3 call differently, or do not have yet."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pyspark.sql import datasource
from pyspark.sql.pandas import types as _types
from pyspark.sql.types import StructType

__all__ = ["HANDS_OVER_ARROW", "LIMITS_BATCHES", "AvailableNow", "StreamWriter", "arrow_schema", "read_limit"]

HANDS_OVER_ARROW: bool = hasattr(datasource, "DataSourceStreamArrowWriter")
"""Whether a stream gives its writer record batches; before 4.1 they are rows."""

LIMITS_BATCHES: bool = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark tells a source where a batch begins and how much it may have; before 4.2 a source has to know."""

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamWriter
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as AvailableNow
else:
    StreamWriter = getattr(datasource, "DataSourceStreamArrowWriter", datasource.DataSourceStreamWriter)
    if LIMITS_BATCHES:
        AvailableNow = import_module("pyspark.sql.streaming.datasource").SupportsTriggerAvailableNow
    else:  # nobody asks a source for its end

        class AvailableNow:
            """Nothing."""


def arrow_schema(schema: StructType) -> Any:
    """What Spark wants record batches to look like."""
    convert: Any = _types.to_arrow_schema  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    try:
        return convert(schema, timezone="UTC")
    except TypeError:  # before 4.2 it took no time zone, and meant UTC
        return convert(schema)


def read_limit(limit: int | None) -> Any:
    """How much a batch may have; from 4.2 on Spark asks."""
    limits: Any = import_module("pyspark.sql.streaming.datasource")
    return limits.ReadAllAvailable() if limit is None else limits.ReadMaxRows(limit)
