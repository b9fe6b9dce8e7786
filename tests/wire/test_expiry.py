"""Hearing of expired keys: on every topology, through lost connections, and whatever the server allows."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from conquiet import QueueError
from conquiet.wire import expiry
from conquiet.wire.address import Address
from conquiet.wire.connections import Connections
from conquiet.wire.expiry import Expiry, merged
from conquiet.wire.streams import pack
from tests.conftest import CLUSTERS, Rung
from tests.rigs.asking import ask
from tests.rigs.cluster import LocalCluster
from tests.rigs.sentinel import SERVICE, LocalSentinels
from tests.rigs.servers import on_a_port
from tests.rigs.waiting import eventually, held

pytestmark = pytest.mark.slow

FLAGS = "notify-keyspace-events"


class Ear:
    """How often something was heard."""

    def __init__(self, link: Connections) -> None:
        self.link = link
        self.heard = 0

    def hear(self) -> None:
        self.heard += 1


@asynccontextmanager
async def listening(url: str, prefix: str, *, enable: bool = False) -> AsyncIterator[Ear]:
    """A listener that has subscribed."""
    ear = Ear(Connections(Address.of(url)))
    task = asyncio.create_task(Expiry(ear.link, prefix, ear.hear, enable=enable).listen())
    try:
        await eventually(lambda: ear.heard > 0, "it listens")
        yield ear
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await ear.link.aclose()


async def flags_of(url: str) -> str:
    _, flags = await ask(url, "CONFIG", "GET", FLAGS)
    return str(flags)


async def expire(url: str, *keys: str) -> None:
    """Let keys expire, and return when they have."""
    for key in keys:
        await ask(url, "SET", key, "x", "PX", 1)

    async def are_gone() -> bool:
        return not any([await ask(url, "EXISTS", key) for key in keys])

    await eventually(are_gone, "the keys are gone")


async def hears(url: str, ear: Ear, key: str) -> None:
    """Return once it has heard that a key expired."""
    before = ear.heard
    await expire(url, key)
    await eventually(lambda: ear.heard > before, f"it hears of {key}")


@pytest.fixture
async def url(rung: Rung) -> AsyncIterator[str]:
    """A server of the test's own: these tests change its settings."""
    async with on_a_port(rung.binary) as server:
        yield server.url


@pytest.fixture
def prefix() -> str:
    return f"mutex:{{{secrets.token_hex(4)}}}:"


@pytest.fixture
def quick_to_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "_BEAT", 0.1)


# --- what the server is asked to tell -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", "Kx"),
        ("Kx", None),
        ("xK", None),
        ("AKE", None),
        ("KA", None),
        ("Elg", "ElgKx"),
        ("Ex", "ExK"),
        ("K$", "K$x"),
        ("AE", "AEK"),
    ],
)
def test_flags_are_added_to_those_that_are_there(flags: str, wanted: str | None) -> None:
    assert merged(flags) == wanted


@pytest.mark.parametrize("before", ["", "El", "AK"])
async def test_enabling_keeps_what_others_need(before: str, url: str, prefix: str) -> None:
    await ask(url, "CONFIG", "SET", FLAGS, before)
    async with listening(url, prefix, enable=True) as ear:
        wanted = {*before} | ({"K"} if "A" in before else {"K", "x"})
        assert {*await flags_of(url)} == wanted
        await hears(url, ear, f"{prefix}one")


async def test_listening_changes_nothing_at_the_server(url: str, prefix: str) -> None:
    async with listening(url, prefix) as ear:
        assert await flags_of(url) == ""
        await ask(url, "CONFIG", "SET", FLAGS, "Kx")
        await hears(url, ear, f"{prefix}one")
    assert await ask(url, "PUBSUB", "NUMPAT") == 0


async def test_a_server_that_forbids_config_only_gets_a_warning(
    url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(url, "CONFIG", "SET", FLAGS, "Kx")
    await ask(url, "ACL", "SETUSER", "app", "on", ">word", "~*", "&*", "+@all", "-config")
    with caplog.at_level(logging.WARNING, "conquiet"):
        async with listening(url.replace("redis://", "redis://app:word@"), prefix, enable=True) as ear:
            await hears(url, ear, f"{prefix}one")
            await ask(url, "CLIENT", "KILL", "TYPE", "pubsub")
            await hears(url, ear, f"{prefix}two")
    asked = [record.message for record in caplog.records if "cannot be asked" in record.message]
    assert len(asked) == 1
    assert "word" not in asked[0]


async def test_a_user_who_may_not_subscribe_is_warned_of_it_once_and_may_later(
    url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(url, "CONFIG", "SET", FLAGS, "Kx")
    await ask(url, "ACL", "SETUSER", "app", "on", ">word", "~*", "resetchannels", "+@all")
    ear = Ear(Connections(Address.of(url.replace("redis://", "redis://app:word@"))))
    with caplog.at_level(logging.DEBUG, "conquiet"):
        task = asyncio.create_task(Expiry(ear.link, prefix, ear.hear).listen())
        await eventually(lambda: len(caplog.records) >= 3, "it tries again and again")
        assert [record.levelname for record in caplog.records[:3]] == ["WARNING", "DEBUG", "DEBUG"]
        assert not ear.heard
        await ask(url, "ACL", "SETUSER", "app", "allchannels")
        await eventually(lambda: ear.heard > 0, "it listens")
        await hears(url, ear, f"{prefix}one")
        task.cancel()
        await asyncio.wait([task])
    await ear.link.aclose()


# --- which keys -----------------------------------------------------------------------------------------------------


async def test_only_its_own_keys_and_their_end_are_heard_of(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def each_alone(parser: object) -> None: ...

    monkeypatch.setattr(expiry, "_gather", each_alone)
    await ask(url, "CONFIG", "SET", FLAGS, "KA")
    async with listening(url, "a*b[1]?:") as ear:
        before = ear.heard
        await expire(url, "axb1x:one", "other")
        await ask(url, "SET", "a*b[1]?:one", "x")
        await ask(url, "PEXPIRE", "a*b[1]?:one", 60_000)
        await ask(url, "DEL", "a*b[1]?:one")
        await hears(url, ear, "a*b[1]?:one")
        assert ear.heard == before + 1


async def test_another_database_has_its_own_events(url: str, prefix: str) -> None:
    await ask(url, "CONFIG", "SET", FLAGS, "Kx")
    async with listening(f"{url}/3", prefix) as third, listening(url, prefix) as first:
        before = first.heard
        await hears(f"{url}/3", third, f"{prefix}one")
        assert first.heard == before
        await hears(url, first, f"{prefix}one")


async def test_keys_that_expire_together_are_heard_of_together(url: str, prefix: str) -> None:
    await ask(url, "CONFIG", "SET", FLAGS, "Kx")
    async with listening(url, prefix) as ear:
        before = ear.heard
        script = "for i = 1, 2000 do redis.call('SET', KEYS[1] .. i, 'x', 'PX', 1) end"
        await ask(url, "EVAL", script, 1, prefix)
        await hears(url, ear, f"{prefix}last")

        async def are_gone() -> bool:
            return bool(await ask(url, "DBSIZE") == 0)

        await eventually(are_gone, "the keys are gone")
        assert ear.heard - before < 200


# --- trouble --------------------------------------------------------------------------------------------------------


async def test_a_lost_connection_is_made_again_and_what_was_missed_is_supposed(url: str, prefix: str) -> None:
    await ask(url, "CONFIG", "SET", FLAGS, "Kx")
    async with listening(url, prefix) as ear:
        for round in range(3):
            before = ear.heard
            assert await ask(url, "CLIENT", "KILL", "TYPE", "pubsub") == 1
            await eventually(lambda before=before: ear.heard > before, "it listens again")  # type: ignore[misc]
            await hears(url, ear, f"{prefix}{round}")


async def test_a_server_that_was_restarted_is_asked_to_tell_again(rung: Rung, prefix: str) -> None:
    async with on_a_port(rung.binary) as server:
        url = server.url
        async with listening(url, prefix, enable=True) as ear:
            before = ear.heard
            await server.aclose()
            async with on_a_port(rung.binary, port=int(url.rsplit(":", 1)[1])):
                await eventually(lambda: ear.heard > before, "it listens again")
                await hears(url, ear, f"{prefix}one")


@pytest.mark.usefixtures("quick_to_doubt")
async def test_a_silent_server_is_noticed_and_an_idle_one_is_kept(rung: Rung, prefix: str) -> None:
    async with (
        on_a_port(rung.binary, settings={FLAGS: "Kx"}) as server,
        listening(server.url, prefix) as ear,
    ):
        before = ear.heard

        async def was_asked() -> bool:
            return "cmd=ping" in await ask(server.url, "CLIENT", "LIST", "TYPE", "pubsub")

        await eventually(was_asked, "the idle connection is asked")
        assert ear.heard == before
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.5)  # the silence itself
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await eventually(lambda: ear.heard > before, "it listens again")
        await hears(server.url, ear, f"{prefix}one")


# --- topologies -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    if not CLUSTERS:
        pytest.skip("no server can be started here")
    with held(LocalCluster(CLUSTERS[0].binary)) as cluster:
        yield cluster


@pytest.mark.usefixtures("quick_to_doubt")
async def test_in_a_cluster_it_listens_where_the_keys_are_and_follows_them(cluster: LocalCluster, prefix: str) -> None:
    home = await cluster.owner_of(prefix)
    async with listening(cluster.url, prefix, enable=True) as ear:
        patterns = {node: await ask(node.url, "PUBSUB", "NUMPAT") for node in cluster.nodes}
        assert patterns == {node: int(node == home) for node in cluster.nodes}
        await hears(cluster.url, ear, f"{prefix}one")
        migration = await cluster.migration_of(prefix)
        await migration.begin()
        await migration.finish()
        before = ear.heard
        await ear.link.call(prefix, pack("EXISTS", prefix))  # whoever uses the link learns of it
        await eventually(lambda: ear.heard > before, "it listens again")
        assert await ask(migration.target.url, "PUBSUB", "NUMPAT") == 1
        await hears(cluster.url, ear, f"{prefix}two")


@pytest.mark.usefixtures("quick_to_doubt")
async def test_behind_sentinels_it_listens_at_the_new_master(rung: Rung, prefix: str) -> None:
    if not rung.binary:
        pytest.skip("Sentinels are started from a binary")
    async with LocalSentinels(rung.binary) as sentinels:
        seeds = ",".join(f"{host}:{port}" for host, port in sentinels.seeds)
        async with listening(f"redis+sentinel://{seeds}/{SERVICE}", prefix, enable=True) as ear:
            await hears(await sentinels.master_url(), ear, f"{prefix}one")
            before = ear.heard
            await sentinels.fail_over()
            with suppress(QueueError):  # the old master refuses it: whoever uses the link learns of it
                await ear.link.call(prefix, pack("SET", prefix, "x"))
            await eventually(lambda: ear.heard > before, "it listens again")
            master = await sentinels.master_url()
            assert await ask(master, "PUBSUB", "NUMPAT") == 1
            await hears(master, ear, f"{prefix}two")
