"""Payloads as structs, by Spark's own ``from_json``."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from conquiet.errors import ConfigError

__all__ = ["CORRUPT", "parsed"]

CORRUPT: Final = "_corrupt"


def parsed(frame: DataFrame, schema: StructType | str) -> DataFrame:
    """``frame`` with its column ``payload`` as a struct of ``schema``; ``_corrupt`` has the text of what does not fit.

    ``schema`` is a ``StructType``, or DDL such as ``"order LONG, customer STRING"``. It is Spark's ``from_json``: a
    field that is missing or does not fit is null, and no message fails a job. ``select("payload.*")`` flattens it.
    """
    wanted = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    if not isinstance(wanted, StructType):
        raise ConfigError(f"the schema of a payload is a struct, not {wanted.simpleString()}")
    if CORRUPT in wanted.fieldNames():
        raise ConfigError(f"{CORRUPT} is where payloads are that do not fit: no field of the schema can have that name")
    if "payload" not in frame.columns:
        raise ConfigError(f"there is no column 'payload', only {', '.join(frame.columns)}")
    whole = StructType([*wanted.fields, StructField(CORRUPT, StringType())])
    read = f.from_json(f.col("payload").cast("string"), whole, {"columnNameOfCorruptRecord": CORRUPT})
    found = frame.withColumn("payload", read).withColumn(CORRUPT, f.col("payload").getField(CORRUPT))
    return found.withColumn("payload", f.col("payload").dropFields(CORRUPT))
