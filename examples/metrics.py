"""Serve Prometheus metrics beside a consumer: ``python -m examples.metrics`` stays up with ``--serve``."""

from __future__ import annotations

import argparse
import asyncio
import urllib.request

from prometheus_client import start_http_server

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, RedisStreamsQueue


async def consume(queue: RedisStreamsQueue, count: int) -> None:
    async with QueueConsumer(queue) as consumer:
        async for message in consumer.iter_messages():
            await consumer.ack(message)
            count -= 1
            if count == 0:
                consumer.stop()


async def main(serve: bool) -> None:
    server, thread = start_http_server(9464 if serve else 0, addr="127.0.0.1")
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    config = QueueConfig(stream_key="orders", consumer_group="billing", consumer_name="billing-1", block_ms=500)
    async with EmbeddedRedis() as redis, RedisStreamsQueue.connect(redis.url, config) as queue:
        await queue.enqueue_many([{"order": number} for number in range(100)])
        await consume(queue, 100)
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        lines = [line for line in text.splitlines() if line.startswith("conquiet_") and "_created" not in line]
        print("\n".join(line for line in lines if "_bucket" not in line))
        if serve:
            print(f"serving {url} until Ctrl-C")
            async for _ in QueueConsumer(queue).iter_messages():
                pass
    server.shutdown()
    server.server_close()
    thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="keep serving on port 9464")
    asyncio.run(main(parser.parse_args().serve))
