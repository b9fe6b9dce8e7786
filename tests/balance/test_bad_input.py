"""What is wrong with an argument is said at once, by its name and the rule."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from conquiet.balance import StreamBalancer
from conquiet.errors import ConfigError, PayloadError, QueueError
from tests.balance.crew import Crew
from tests.rigs.waiting import LONG

BAD: list[tuple[str, Any]] = [
    *(("service", value) for value in (None, "", "a b", "x" * 201, 7, b"s", "ü", "a:b", "{a}")),
    *(("consumer", value) for value in ("", "a b", "x" * 201, 7, "a#b", "a|b")),
    *(("lease_ttl", value) for value in (0, -1, None, "15", True, math.nan, math.inf)),
    *(("max_streams", value) for value in (0, -1, 1.5, None, True, "9")),
    *(("auto_claim", value) for value in (None, 1, "yes")),
    *(("rebalance", value) for value in (1, "yes")),
    *(("progress_timeout", value) for value in (0, -1, "9", math.inf, True)),
    *(("sweep_interval", value) for value in (0, -1, "9", math.nan)),
    *(("drain_timeout", value) for value in (-1, None, "4", True, math.nan, math.inf)),
    *(("event_buffer", value) for value in (0, -1, 1.5, None)),
    *(("handle_signals", value) for value in (None, 1)),
    *(("keyspace_hint", value) for value in ("", "maybe", True)),
    *(("clock", value) for value in (None, 1)),
]


@pytest.mark.any_server
@pytest.mark.parametrize(("name", "value"), BAD)
def test_of_the_balancer(name: str, value: Any) -> None:
    arguments = {"service": "s", name: value}
    with pytest.raises(ConfigError, match=rf"^{name} .*{re.escape(repr(value))}"):
        StreamBalancer("redis://localhost:1", **arguments)
    with pytest.raises(ConfigError, match=rf"^{name} .*{re.escape(repr(value))}"):
        StreamBalancer.connect("redis://localhost:1", **arguments)


@pytest.mark.parametrize("url", ["", "localhost", "http://x", None, 7])
def test_of_an_address(url: Any) -> None:
    with pytest.raises(ConfigError):
        StreamBalancer(url, service="s")


@pytest.mark.parametrize("lease_ttl", [1e17, 1e300])
def test_a_lease_for_longer_than_the_server_can_count_is_refused(lease_ttl: float) -> None:
    with pytest.raises(ConfigError, match="lease_ttl"):
        StreamBalancer("redis://localhost:1", service="s", lease_ttl=lease_ttl)


@pytest.mark.any_server
@pytest.mark.parametrize("stream", [None, "", 7, b"s", "x" * 1025, "ü" * 513, "\ud800"])
@pytest.mark.parametrize("verb", ["add_stream", "claim", "done_stream", "release_stream"])
async def test_of_a_stream(crew: Crew, verb: str, stream: Any) -> None:
    member = await crew.join()
    with pytest.raises(ConfigError, match="stream"):
        await getattr(member.balancer, verb)(stream)
    assert await crew.size() == 0


@pytest.mark.any_server
@pytest.mark.parametrize("info", [7, "text", ["a"], [("a", 1)], True])
async def test_of_info_that_is_no_mapping(crew: Crew, info: Any) -> None:
    member = await crew.join()
    with pytest.raises(ConfigError, match=rf"info must be a mapping, not {re.escape(repr(info))}"):
        await member.balancer.add_stream("s", info)


@pytest.mark.any_server
@pytest.mark.parametrize("value", [math.nan, object(), {1: 2}, b"x", 2**70, {"a": "\ud800"}, (1, 2)])
async def test_of_info_that_json_cannot_carry(crew: Crew, value: Any) -> None:
    member = await crew.join()
    with pytest.raises(PayloadError, match=r"x"):
        await member.balancer.add_stream("s", {"x": value})
    assert await crew.size() == 0


def takes_one(stream: str) -> None:
    raise AssertionError


async def takes_three(stream: str, lease: object, more: object) -> None:
    raise AssertionError


async def wants_a_name(stream: str, *, lease: object) -> None:
    raise AssertionError


def yields(stream: str, lease: object) -> Iterator[int]:
    yield 1


@pytest.mark.any_server
@pytest.mark.parametrize("handler", [None, 7, "text", takes_one, takes_three, wants_a_name, yields, lambda: None])
async def test_of_a_handler(crew: Crew, handler: Any) -> None:
    """When it is given, and not for each stream."""
    member = await crew.join(listen=False)
    with pytest.raises(ConfigError, match=r"^handler "):
        await member.balancer.run(handler)
    await member.balancer.add_stream("s")
    await member.owns("s")


class Fine:
    def __call__(self, stream: str, lease: object) -> None:
        pass

    async def method(self, *args: object) -> None:
        pass


@pytest.mark.any_server
@pytest.mark.parametrize(
    "handler", [Fine(), Fine().method, partial(takes_three, more=1), lambda stream, lease=None: None]
)
async def test_whatever_can_be_called_with_a_stream_and_its_lease_is_a_handler(crew: Crew, handler: Any) -> None:
    member = await crew.join(listen=False)
    member.run(handler)
    member.balancer.stop()
    await member.ended()


@pytest.mark.any_server
async def test_of_a_forgotten_async_with(crew: Crew) -> None:
    """Nothing hangs."""
    balancer = crew.make()
    async with asyncio.timeout(LONG):
        with pytest.raises(ConfigError, match="async with"):
            await anext(balancer.events())
        with pytest.raises(ConfigError, match="async with"):
            await balancer.run(Fine().method)
        with pytest.raises(ConfigError, match="async with"):
            await balancer.claim("s")
        for verb in (balancer.done_stream, balancer.release_stream):
            with pytest.raises(ConfigError, match="async with"):
                await verb("s")
    await balancer.aclose()


@pytest.mark.any_server
async def test_an_input_key_that_is_no_stream_is_said_on_opening(crew: Crew) -> None:
    await crew.ask("SET", crew.keys.input, "text")
    balancer = crew.make()
    with pytest.raises(QueueError, match="WRONGTYPE"):
        await balancer.open()
    with pytest.raises(QueueError, match="WRONGTYPE"):
        async with crew.make():
            pass


async def test_a_server_that_is_not_there_is_said_on_opening() -> None:
    balancer = StreamBalancer("redis://127.0.0.1:1", service="s", handle_signals=False)
    with pytest.raises(QueueError, match=r"127\.0\.0\.1:1"):
        await balancer.open()
    await balancer.aclose()


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"POD_NAME": "pod-7", "POD_IP": "10.0.0.1"}, "pod-7"),
        ({"POD_NAME": "", "POD_IP": "10.0.0.1"}, "10.0.0.1"),
        ({"POD_IP": "fe80::1"}, "fe80--1"),
        ({"POD_NAME": "x" * 300}, "x" * 200),
    ],
)
def test_the_name_of_a_consumer_comes_from_its_pod(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], name: str
) -> None:
    for key in ("POD_NAME", "POD_IP"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    balancer = StreamBalancer("redis://localhost:1", service="s")
    assert re.fullmatch(rf"{re.escape(name)}#[0-9a-f]{{32}}", balancer.consumer)


def test_without_a_pod_a_consumer_is_named_after_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for key in ("POD_NAME", "POD_IP"):
        monkeypatch.delenv(key, raising=False)
    first, second = (StreamBalancer("redis://localhost:1", service="s") for _ in range(2))
    assert str(os.getpid()) in first.consumer
    assert first.consumer != second.consumer
