"""Topics and PySpark: DataFrames and streams go into topics and come out of them.

``TopicSink`` and ``publish`` send the rows of any DataFrame; ``register`` makes ``format("conquiet")`` known, for
bounded reads, streams and writes; ``replay`` gives dead letters back that a DataFrame has chosen. It needs PySpark 4.0
or newer and pyarrow, the extra ``spark``; in the driver and on every executor.
"""

from __future__ import annotations

from conquiet.spark.deadletters import replay
from conquiet.spark.sink import TopicSink, Written, publish
from conquiet.spark.source import TopicDataSource, register

__all__ = ["TopicDataSource", "TopicSink", "Written", "publish", "register", "replay"]
