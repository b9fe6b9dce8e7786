"""Users, certificates and servers that refuse a queue, and how it is told."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, QueueError, RedisStreamsQueue
from tests.conftest import Server
from tests.rigs.asking import blocked
from tests.rigs.proxy import Proxy
from tests.rigs.sentinel import SERVICE
from tests.rigs.waiting import eventually
from tests.wire.places import (
    FOREVER,
    Place,
    a_stop_ends_a_blocked_read,
    acl,
    authority,
    authority_file,
    binary,
    everything_works,
    locked_server,
    no_client,
    nobody_listens,
    place,
    plain,
    tls,
    tls_proxy,
    unix,
    unix_server,
)

__all__ = [
    "acl",
    "authority",
    "authority_file",
    "binary",
    "locked_server",
    "no_client",
    "place",
    "plain",
    "tls",
    "tls_proxy",
    "unix",
    "unix_server",
]

pytestmark = pytest.mark.slow

# --- users -----------------------------------------------------------------------------------------


async def test_a_user_may_not_touch_other_streams(acl: Place, config: QueueConfig) -> None:
    other = replace(config, stream_key=f"other:{config.stream_key}")
    async with aclosing(RedisStreamsQueue(acl.url, other)) as queue:
        with pytest.raises(QueueError, match="permission"):
            await queue.enqueue({"n": 1})


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:wrong@"])
async def test_a_wrong_password_is_a_queue_error(locked_server: EmbeddedRedis, config: QueueConfig, login: str) -> None:
    url = f"redis://{login}{locked_server.url.rpartition('@')[2]}"
    async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
        with pytest.raises(QueueError) as caught:
            await queue.enqueue({"n": 1})
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("place", ["plain", "acl", "unix"], indirect=True)
async def test_a_stop_ends_a_blocked_read(place: Place, config: QueueConfig, url: str) -> None:
    seen_at = place.url if place.url.startswith("unix") else url
    await a_stop_ends_a_blocked_read(place.url, config, lambda: blocked(seen_at))


async def test_where_client_is_forbidden_a_stopped_read_runs_to_its_end(
    no_client: Place, url: str, config: QueueConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisStreamsQueue(no_client.url, config) as queue:
        consumer = QueueConsumer(queue, handle_signals=False)
        with caplog.at_level(logging.WARNING, "conquiet.wire"):
            reading = asyncio.create_task(consumer.next(block_ms=FOREVER))
            await blocked(url)
            consumer.stop()
            await eventually(lambda: "cannot wake" in caplog.text, "a warning that nothing can be woken")
        await blocked(url)  # still
        assert not reading.done()
        entry_id = await queue.enqueue({"n": 1})
        message = await reading
        assert message is not None
        assert message.id == entry_id
        assert await consumer.next(block_ms=FOREVER) is None


async def test_where_client_is_forbidden_a_read_with_nothing_to_read_ends_by_itself(
    no_client: Place, config: QueueConfig
) -> None:
    async with RedisStreamsQueue(no_client.url, config) as queue:
        assert await queue.read(block_ms=20) == []


# --- TLS -------------------------------------------------------------------------------------------


async def test_a_certificate_of_a_stranger_is_refused(tls_proxy: Proxy, config: QueueConfig, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    async with aclosing(RedisStreamsQueue.connect(f"{tls_proxy.url}?ssl_ca_certs={stranger}", config)) as queue:
        with pytest.raises(QueueError, match=r"(?i)certificate"):
            await queue.enqueue({"n": 1})
        assert tls_proxy.received == []


async def test_a_certificate_for_another_host_is_refused(
    server: Server, authority: trustme.CA, authority_file: Path, config: QueueConfig
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("elsewhere.example").configure_cert(context)
    async with Proxy(server.url, secure=context) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={authority_file}"
        async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
            with pytest.raises(QueueError, match=r"(?i)certificate"):
                await queue.enqueue({"n": 1})
        assert proxy.received == []


async def test_a_server_that_wants_a_certificate_gets_the_clients(
    server: Server, authority: trustme.CA, authority_file: Path, config: QueueConfig, tmp_path: Path
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    mine = authority.issue_cert("consumer-1")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    mine.private_key_pem.write_to_path(str(key))
    mine.cert_chain_pems[0].write_to_path(str(certificate))
    async with Proxy(server.url, secure=context) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={authority_file}"
        await everything_works(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}", config)
        proxy.received.clear()
        async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
            with pytest.raises(QueueError):
                await queue.enqueue({"n": 1})
        assert proxy.received == []


async def test_plain_speech_to_a_tls_port_is_a_queue_error(tls_proxy: Proxy, config: QueueConfig) -> None:
    async with aclosing(RedisStreamsQueue.connect(tls_proxy.url.replace("rediss", "redis"), config)) as queue:
        with pytest.raises(QueueError):
            await queue.enqueue({"n": 1})


async def test_a_stop_ends_a_blocked_read_over_tls(tls: Place, url: str, config: QueueConfig) -> None:
    await a_stop_ends_a_blocked_read(tls.url, config, lambda: blocked(url))


# --- nobody ----------------------------------------------------------------------------------------


async def test_a_server_that_is_not_there_is_a_queue_error(config: QueueConfig) -> None:
    async with nobody_listens() as place:
        for url in (f"redis://{place}", f"redis+sentinel://{place}/{SERVICE}", f"redis+cluster://{place}"):
            async with aclosing(RedisStreamsQueue.connect(url, config)) as queue:
                with pytest.raises(QueueError, match=place) as caught:
                    await queue.enqueue({"n": 1})
                assert caught.value.__cause__ is not None
