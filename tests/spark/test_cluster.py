"""A real cluster: a standalone master and two workers, which get the package as the documentation says."""

from __future__ import annotations

import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.waiting import eventually
from tests.spark.conftest import ROOT, Home
from tests.spark.looking import payloads
from tests.spark.standalone import Cluster, environment, packed, standalone, submitted, zipped

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(600)]

PARTITIONS = {"in": 3, "copy": 2, "out": 2}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def program(home: Home, tmp_path: Path) -> Path:
    """A program in a folder of its own, and its topics."""
    for topic, partitions in PARTITIONS.items():
        home.broker.create_topic(topic, partitions=partitions)
    return Path(shutil.copy(ROOT / "tests" / "spark" / "shipping_app.py", tmp_path / "app.py"))


def words(home: Home, program: Path, rows: int) -> list[str]:
    given = {"--url": home.url, "--namespace": home.namespace, "--directory": str(program.parent), "--rows": str(rows)}
    return [str(program), *(word for item in given.items() for word in item)]


def found(home: Home, topic: str) -> Counter[int]:
    partitions = home.broker.admin.describe_topic(topic).partitions
    return Counter(payload["n"] for payload in payloads(home, topic, partitions))


def length(home: Home, topic: str) -> int:
    return home.broker.admin.describe_topic(topic).length


def check(home: Home, rows: int) -> None:
    """All is there, and nothing twice."""
    assert found(home, "in") == found(home, "out") == Counter(range(2 * rows))
    assert found(home, "copy") == Counter(range(rows))


async def test_a_zip_is_shipped_and_an_executor_is_killed(
    cluster: Cluster, home: Home, program: Path, tmp_path: Path, scale: float
) -> None:
    rows = max(6_000, int(200_000 * scale * scale))
    package, python = zipped(tmp_path), environment(tmp_path / "node")
    command = ["--master", cluster.url, "--py-files", str(package), *words(home, program, rows)]
    with submitted(tmp_path, *command, python=python, PYTHONPATH=str(package)) as driver:
        driver.says("streaming")
        await eventually(lambda: length(home, "out") > 0 or not driver.is_running(), "the stream is under way", 300)
        victim, *_ = cluster.executors()
        victim.kill()
        assert length(home, "out") < 2 * rows, "it was killed too late"
        log = driver.ends()
    assert f"the driver has {package}/conquiet" in log
    assert "a task has ./conquiet.zip/conquiet" in log
    check(home, rows)


def test_an_environment_is_shipped(cluster: Cluster, home: Home, program: Path, tmp_path: Path) -> None:
    rows, archive = 1_000, packed(tmp_path)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "environment", filter="fully_trusted")
    command = ["--master", cluster.url, "--archives", f"{archive}#environment", *words(home, program, rows)]
    with submitted(tmp_path, *command, python="./environment/bin/python") as driver:
        log = driver.ends()
    assert "the driver has ./environment/lib/" in log or f"the driver has {tmp_path}/environment/lib/" in log
    assert "a task has ./environment/lib/" in log or "/environment/lib/" in log.split("a task has ")[1].split()[0]
    check(home, rows)
