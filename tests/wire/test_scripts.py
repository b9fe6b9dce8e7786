"""Lua by name: sent by hash, whole only where the server lacks it, and never twice where it ran."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest
from redis.exceptions import ResponseError

import conquiet
from conquiet import QueueError
from conquiet.wire.address import Address
from conquiet.wire.capabilities import is_noscript
from conquiet.wire.connections import Connections
from conquiet.wire.scripts import Call, Script, run, run_many
from conquiet.wire.streams import pack
from tests.conftest import Rung
from tests.rigs.lua_reading import ALLOWED, FRAGMENTS, KINDS, REFUSED, SCRIPTS, TEXTS, kind_of, writes_of
from tests.rigs.proxy import Proxy
from tests.rigs.servers import on_a_port

COUNTER: Final = "return redis.call('INCR', KEYS[1])"


def script(text: str) -> Script:
    return Script("test", text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def fresh() -> Script:
    """A script that counts up a key, and that no server has seen."""
    return script(f"{COUNTER} -- {secrets.token_hex(8)}")


@pytest.fixture
def key() -> str:
    return f"t:{secrets.token_hex(6)}"


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def link(proxy: Proxy) -> AsyncIterator[Connections]:
    link = Connections(Address.of(proxy.url))
    yield link
    await link.aclose()


# --- the files --------------------------------------------------------------------------------------------


def test_includes_are_all_resolved() -> None:
    assert [name for name in SCRIPTS if "--#include" in Script.named(name).text] == []


def test_an_include_is_replaced_by_the_fragment() -> None:
    assert TEXTS["clock"] in Script.named("lease_renew").text


def test_each_script_says_what_it_takes_and_gives() -> None:
    words = ["KEYS", "ARGV", "RETURNS", "MEMORY"]
    heads = {name: re.findall(rf"^-- ({'|'.join(words)})\b", TEXTS[name], re.MULTILINE) for name in SCRIPTS}
    assert {name: head for name, head in heads.items() if head != words} == {}


def test_each_script_is_used_and_each_fragment_included() -> None:
    package = Path(conquiet.__file__).parent
    code = "".join(path.read_text("utf-8") for path in package.rglob("*.py"))
    included = re.findall(r"^--#include (\w+)$", "".join(TEXTS.values()), re.MULTILINE)
    assert set(re.findall(r'Script\.named\("(\w+)"\)', code)) == set(SCRIPTS)
    assert set(included) == FRAGMENTS


async def test_every_server_compiles_each_script_to_the_hash_that_is_sent(link: Connections) -> None:
    scripts = {name: Script.named(name) for name in SCRIPTS}
    hashes = {name: await link.call("any", pack("SCRIPT", "LOAD", found.text)) for name, found in scripts.items()}
    assert hashes == {name: found.sha.encode() for name, found in scripts.items()}


# --- when memory is full ------------------------------------------------------------------------------------


def test_each_script_says_what_it_is_when_memory_is_full_and_its_first_write_makes_it_so() -> None:
    assert {name: kind_of(name) for name in SCRIPTS if kind_of(name) not in KINDS} == {}
    silent = [
        name for name in SCRIPTS if kind_of(name) != "reads" and f"-- MEMORY {kind_of(name)}: " not in TEXTS[name]
    ]
    assert silent == [], "they do not say why"
    assert {name: writes_of(name) for name in SCRIPTS if not _begins_as_it_says(name)} == {}


def _begins_as_it_says(name: str) -> bool:
    kind, writes = kind_of(name), writes_of(name)
    if kind == "reads":
        return writes == ()
    if kind == "adds":
        refuses = writes[0] in REFUSED or writes[0].startswith("stop_when_full")
        return refuses and "go_on_when_full" not in writes
    return writes[0] == "go_on_when_full"


async def test_the_server_refuses_what_is_taken_for_refused_and_nothing_else(link: Connections) -> None:
    """A first write decides: this is what each command counts as."""
    for name in sorted(REFUSED | ALLOWED):
        [about] = await link.call("any", pack("COMMAND", "INFO", name.split()[0]))
        parts = {part[0]: part[2] for part in about[9]} if len(about) > 9 else {}
        flags = parts.get(name.lower().replace(" ", "|").encode(), about[2])
        assert (b"write" in flags, b"denyoom" in flags) == (True, name in REFUSED), name


# --- calls -------------------------------------------------------------------------------------------------


async def test_a_script_is_sent_by_its_hash(link: Connections, proxy: Proxy, key: str) -> None:
    call = fresh()([key])
    await run(link, key, call)
    assert (proxy.count(b"EVALSHA"), proxy.count(b"\r\nEVAL\r\n")) == (1, 1)
    assert await run(link, key, call) == 2
    assert (proxy.count(b"EVALSHA"), proxy.count(b"\r\nEVAL\r\n")) == (2, 1)


async def test_only_refused_calls_are_sent_again(link: Connections, proxy: Proxy, key: str) -> None:
    known = fresh()
    unknown = script(f"return {{redis.call('INCR', KEYS[1]), ARGV[1]}} -- {secrets.token_hex(8)}")
    await run(link, key, known([key]))
    calls = [known([key]), unknown([key], "a"), known([key]), unknown([key], "b")]
    assert await run_many(link, key, calls) == [2, [4, b"a"], 3, [5, b"b"]]
    assert proxy.count(known.text.encode()) == 1
    assert proxy.count(unknown.text.encode()) == 2


async def test_keys_and_arguments_arrive_as_they_are(link: Connections, key: str) -> None:
    echo = script("return {KEYS[1], ARGV[1], ARGV[2], ARGV[3], #KEYS, #ARGV}")
    assert await run(link, key, echo([key], "Grüße", b"\x00\xff", 12)) == [
        key.encode(), "Grüße".encode(), b"\x00\xff", b"12", 1, 3,
    ]  # fmt: skip


async def test_the_error_of_a_script_is_a_queue_error_that_names_the_key(link: Connections, key: str) -> None:
    with pytest.raises(QueueError, match=f"{key}.*gone wrong") as caught:
        await run(link, key, script("return redis.error_reply('ERR gone wrong')")([key]))
    assert isinstance(caught.value.__cause__, ResponseError)


async def test_an_error_among_many_is_a_value_and_hurts_no_other(link: Connections, key: str) -> None:
    counter, broken = fresh(), script("return redis.error_reply('ERR gone wrong')")
    one, error, two = await run_many(link, key, [counter([key]), broken([key]), counter([key])])
    assert (one, two) == (1, 2)
    assert isinstance(error, ResponseError)


async def test_a_lost_answer_is_not_asked_for_again(link: Connections, proxy: Proxy, key: str) -> None:
    call = fresh()([key])
    await run(link, key, call)
    cut = proxy.cut(b"EVALSHA")
    with pytest.raises(QueueError):
        await run(link, key, call)
    assert cut.is_set()
    assert await link.call(key, pack("GET", key)) == b"2"


async def test_scripts_come_back_after_the_server_forgot_them(rung: Rung, key: str) -> None:
    async with on_a_port(rung.binary) as server:
        link = Connections(Address.of(server.url))
        calls: list[Call] = [fresh()([key]), fresh()([key])]
        assert await run_many(link, key, calls) == [1, 2]
        await link.call(key, pack("SCRIPT", "FLUSH"))
        assert await run_many(link, key, calls) == [3, 4]
        await link.aclose()


def test_only_a_refusal_for_want_of_the_script_counts_as_one() -> None:
    assert is_noscript(ResponseError("NOSCRIPT No matching script. Please use EVAL."))
    assert not is_noscript(ResponseError("ERR value is not an integer"))
    assert not is_noscript(b"NOSCRIPT")
