"""What type checkers must see of the asynchronous API of balanced streams; read by them, never run.

Lines that must be errors carry a comment that becomes an error itself, for mypy and for pyright, when they are not.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

from redis.asyncio import Redis, RedisCluster

from conquiet import Address, QueueMessage, StreamBalancer, StreamLease


class Balancer(StreamBalancer):
    """Somebody's own."""


def ways_to_a_balancer(client: Redis, cluster: RedisCluster, address: Address) -> None:
    assert_type(StreamBalancer.connect("redis://localhost", service="shop"), StreamBalancer)
    assert_type(StreamBalancer.connect(url="redis://localhost", service="shop", lease_ttl=5), StreamBalancer)
    assert_type(StreamBalancer(client, service="shop", consumer=None, max_streams=10), StreamBalancer)
    assert_type(StreamBalancer(cluster, service="shop", auto_claim=True, rebalance=False), StreamBalancer)
    assert_type(StreamBalancer(address, service="shop", keyspace_hint="listen", handle_signals=False), StreamBalancer)
    assert_type(StreamBalancer(client=address, service="shop", event_buffer=10), StreamBalancer)
    assert_type(Balancer.connect("redis://localhost", service="shop", progress_timeout=None), Balancer)


async def the_balancer(balancer: StreamBalancer) -> None:
    assert_type(balancer.consumer, str)
    assert_type(balancer.owned, Mapping[str, StreamLease])
    assert_type(await balancer.add_stream("cart-1", {"of": "me"}), str)
    lease = await balancer.claim("cart-1")
    assert_type(lease, StreamLease)
    assert_type(await lease.read(count=10, block_ms=5), list[QueueMessage])
    assert_type(await balancer.done_stream("cart-1"), None)
    assert_type(await balancer.release_stream("cart-2"), None)
    assert_type(balancer.stop(), None)
    assert_type(await balancer.aclose(), None)


# --- what must be refused -------------------------------------------------------------------------------------------


def wrong_arguments_of_a_balancer(some: Any) -> None:
    # `some` is Any: mypy may also report that a value given without its name does not fit one of the options.
    StreamBalancer("redis://localhost")  # type: ignore[call-arg]
    StreamBalancer("redis://localhost", some)  # type: ignore[call-arg]
    StreamBalancer("redis://localhost", service=5)  # type: ignore[arg-type]
    StreamBalancer("redis://localhost", service="shop", lease_tll=5)  # type: ignore[call-arg]
    StreamBalancer("redis://localhost", service="shop", lease_ttl="5")  # type: ignore[arg-type]
    StreamBalancer("redis://localhost", service="shop", keyspace_hint="maybe")  # type: ignore[arg-type]
    StreamBalancer(b"redis://", service="shop")  # type: ignore[arg-type]
    StreamBalancer.connect("redis://localhost")  # type: ignore[call-arg]
    StreamBalancer.connect("redis://localhost", some)  # type: ignore[call-arg]
    StreamBalancer.connect("redis://localhost", service="shop", max_stream=5)  # type: ignore[call-arg]
    StreamBalancer.connect("redis://localhost", service="shop", max_streams=None)  # type: ignore[arg-type]
    StreamBalancer.connect(5, service="shop")  # type: ignore[arg-type]
