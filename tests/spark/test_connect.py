"""Spark Connect: a server, and a client that has no JVM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.spark.conftest import ROOT, Home
from tests.spark.looking import payloads
from tests.spark.standalone import submitted

NEEDED = ("grpc", "grpc_status", "google.rpc", "pandas", "zstandard")

pytestmark = [pytest.mark.any_server, pytest.mark.timeout(600)]

ROWS = 900


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    missing = [module for module in NEEDED if not is_installed(module)]
    if missing:
        pytest.skip(f"Spark Connect needs {', '.join(missing)}: pip install 'pyspark[connect]'")
    port = free_port()
    settings = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}
    command = ["--master", "local[2]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with submitted(tmp_path, *command, python=sys.executable, settings=settings, PYTHONPATH=str(ROOT)) as server:
        server.says("Spark Connect server started at")
        yield f"sc://127.0.0.1:{port}"


def test_a_client_writes_reads_and_streams(remote: str, home: Home, tmp_path: Path) -> None:
    home.broker.create_topic("in", partitions=3)
    home.broker.create_topic("out", partitions=2)
    given = {"--remote": remote, "--url": home.url, "--namespace": home.namespace, "--directory": str(tmp_path)}
    words = [word for item in given.items() for word in item]
    command = [sys.executable, "-m", "tests.spark.connect_app", *words, "--rows", str(ROWS)]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    }
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert f"read {ROWS} {ROWS}" in done.stdout
    assert Counter(payload["n"] for payload in payloads(home, "out", 2)) == Counter(range(ROWS))
