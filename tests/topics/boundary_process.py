"""A victim as a process of its own, to be killed. Arguments: proxy, server, namespace, path, number of messages."""

from __future__ import annotations

import asyncio
import sys

from conquiet.topics.broker import Broker
from tests.rigs.cluster_tracing import through
from tests.topics.boundaries import Scene


async def main(proxy: str, url: str, namespace: str, path: str, sent: str) -> None:
    async with Broker(through(proxy, url), namespace=namespace) as broker:
        await Scene(url, namespace, path, set(range(int(sent)))).walk(broker)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
