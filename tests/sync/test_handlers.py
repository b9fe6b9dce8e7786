"""In every room of the facade a handler that could not be called is refused when it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conquiet.sync import (
    Broker,
    ConfigError,
    JobQueue,
    JobWorker,
    MemoryStore,
    QueueConfig,
    QueueConsumer,
    RedisStreamsQueue,
    StreamBalancer,
    SubscribeOptions,
)

AWAY = "redis://127.0.0.1:1"


def subscribe(max_inflight: int) -> Callable[[Any], object]:
    options = SubscribeOptions(max_inflight=max_inflight)
    return lambda handler: Broker(AWAY).subscribe("orders", group="g", handler=handler, options=options)


def work(concurrency: int) -> Callable[[Any], object]:
    return lambda handler: JobWorker(JobQueue(MemoryStore(), "q"), handler, concurrency=concurrency)


def run_queue(handler: Any) -> None:
    config = QueueConfig("orders", "g", "c")
    factory: Any = type("Factory", (), {"begin": lambda self: None})()
    QueueConsumer(RedisStreamsQueue(AWAY, config), handle_signals=False).run(handler=handler, db_factory=factory)


def run_streams(handler: Any) -> None:
    StreamBalancer(AWAY, service="ingest", handle_signals=False).run(handler)


ROOMS: dict[str, Callable[[Any], object]] = {
    "topics, by the caller": subscribe(1),
    "topics, by threads": subscribe(10),
    "jobs, by the caller": work(1),
    "jobs, by threads": work(10),
    "queue": run_queue,
    "balance": run_streams,
}


def of_three(one: Any, two: Any, three: Any) -> None: ...


def yields(*args: Any) -> Any:
    yield


@pytest.mark.parametrize("room", ROOMS)
def test_a_handler_of_the_wrong_signature_is_refused(room: str) -> None:
    with pytest.raises(ConfigError, match=r"handler is called with \(.*\), but it is .*of_three\(one, two, three\)"):
        ROOMS[room](of_three)


@pytest.mark.parametrize("room", ROOMS)
def test_a_generator_function_is_refused(room: str) -> None:
    with pytest.raises(ConfigError, match=r"handler must not be a generator function, as .*yields is"):
        ROOMS[room](yields)


@pytest.mark.parametrize("room", ROOMS)
def test_what_cannot_be_called_is_refused(room: str) -> None:
    with pytest.raises(ConfigError, match="handler must be callable, not 7"):
        ROOMS[room](7)
