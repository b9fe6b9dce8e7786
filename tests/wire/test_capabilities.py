"""What differs between servers is asked by command, once a node, and known in one module."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import NoPermissionError, ResponseError

import conquiet
from conquiet import Address, EmbeddedRedis
from conquiet.wire.capabilities import Capabilities, is_demoted, is_forbidden, lag_of, node_in_doubt
from conquiet.wire.connections import Connections
from conquiet.wire.interrupt import Interrupt
from conquiet.wire.streams import xread
from tests.conftest import Rung
from tests.rigs.access import User
from tests.rigs.asking import ask, blocked
from tests.rigs.proxy import Proxy

KEY = "t:capabilities"


async def interrupted_read(link: Connections, server: str) -> None:
    """A read that blocks, and is woken or torn off."""
    interrupt = Interrupt()
    reading = asyncio.create_task(link.wait(KEY, xread({KEY: "0-0"}, block_ms=60_000), 60, interrupt, harmless=True))
    await blocked(server)
    interrupt.request()
    assert await reading is None
    await blocked(server, 0)


async def test_a_node_is_asked_once_whether_reads_can_be_woken(url: str) -> None:
    async with Proxy(url) as proxy, aclosing(Connections(Address.of(proxy.url))) as link:
        for _ in range(3):
            await interrupted_read(link, url)
            await ask(url, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert proxy.count(b"UNBLOCK\r\n$1\r\n0\r\n") == 1


@pytest.mark.parametrize("what", ["UNBLOCK", "CLIENT"])
async def test_where_it_is_forbidden_it_is_not_tried_again(url: str, what: str) -> None:
    async with User(url) as user, Proxy(user.url) as proxy, aclosing(Connections(Address.of(proxy.url))) as link:
        await ask(url, "ACL", "SETUSER", user.name, *(("-client", "+client|id") if what == "UNBLOCK" else ("-client",)))
        for _ in range(2):
            await interrupted_read(link, url)
        assert proxy.count(b"UNBLOCK") == 1


def test_only_a_refusal_for_want_of_the_right_or_the_command_is_believed() -> None:
    node = Capabilities()
    node.learn([ResponseError("LOADING Redis is loading the dataset in memory")])
    assert len(node.questions()) == 1
    node.learn([NoPermissionError("this user has no permissions")])
    assert node.can_unblock is False
    assert node.questions() == ()


@pytest.mark.parametrize("command", [("NOSUCH",), ("CLIENT", "NOSUCH", "1")])
async def test_every_server_is_understood_when_it_lacks_a_command(url: str, command: tuple[str, ...]) -> None:
    with pytest.raises(ResponseError) as caught:
        await ask(url, *command)
    assert is_forbidden(caught.value)


async def test_every_server_is_understood_when_a_script_writes_to_a_replica(rung: Rung, url: str) -> None:
    script = "return redis.call('SET', KEYS[1], 1)"
    async with EmbeddedRedis(binary=rung.binary or None, unix_socket=False) as replica:
        host, _, port = url.rpartition("@")[2].rpartition("/")[2].partition(":")
        await ask(replica.url, "REPLICAOF", host, port)
        with pytest.raises(ResponseError) as caught:
            await ask(replica.url, "EVAL", script, 1, KEY)
        assert is_demoted(caught.value)
        assert node_in_doubt(caught.value)


@pytest.mark.parametrize(("row", "lag"), [({}, None), ({"lag": None}, None), ({"lag": 7}, 7), ({"lag": 0}, 0)])
def test_the_lag_of_a_group_where_it_is_told(row: dict[str, Any], lag: int | None) -> None:
    assert lag_of(row) == lag


def test_no_other_module_knows_a_version_or_the_words_of_a_refusal() -> None:
    words = re.compile(
        r"(?<!b)\"-?(?:NOGROUP|BUSYGROUP|NOSCRIPT|READONLY|WRONGTYPE|NOPERM|OOM)|redis_version|valkey_version"
    )
    package = Path(conquiet.__file__).parent
    known = {package / "wire" / name for name in ("capabilities.py", "embedded.py")}
    found = [str(path) for path in package.rglob("*.py") if path not in known and words.search(path.read_text("utf-8"))]
    assert found == []
