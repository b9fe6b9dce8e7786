"""One Spark for all of these tests: to start one takes half a minute."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from conquiet.spark import register
from conquiet.sync import Broker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark with two slots, that tries a failed task up to four times."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("conquiet-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    yield session
    session.stop()


@dataclass(frozen=True)
class Home:
    """A place of one test's own on a server, and how Spark is told of it."""

    url: str
    broker: Broker
    namespace: str
    options: dict[str, str] = field(default_factory=dict)

    def of(self, topic: str, **more: object) -> dict[str, str]:
        return {**self.options, "topic": topic, **{name: str(value) for name, value in more.items()}}


@pytest.fixture
def home(url: str) -> Iterator[Home]:
    namespace = f"t{secrets.token_hex(4)}"
    with Broker.connect(url, namespace=namespace) as broker:
        yield Home(url, broker, namespace, {"url": url, "namespace": namespace})
