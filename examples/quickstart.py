"""Send messages, read them, acknowledge them."""

from __future__ import annotations

import asyncio

from conquiet import EmbeddedRedis, QueueConfig, QueueConsumer, RedisStreamsQueue


async def main() -> None:
    config = QueueConfig(stream_key="orders", consumer_group="billing", consumer_name="billing-1")
    # With a Redis of your own: RedisStreamsQueue.connect("redis://localhost:6379", config)
    async with EmbeddedRedis() as server, RedisStreamsQueue.connect(server.url, config) as queue:
        await queue.enqueue({"order": 1, "amount": "12.50"})
        await queue.enqueue_many([{"order": number, "amount": "9.99"} for number in range(2, 6)])

        async with QueueConsumer(queue) as consumer:
            async for message in consumer.iter_messages():
                print(f"order {message.payload['order']}: {message.payload['amount']}")
                await consumer.ack(message)  # until this, the message would be delivered again after a crash
                if message.payload["order"] == 5:
                    consumer.stop()

        stats = await queue.backlog_stats()
        print(f"{stats.length} in the stream, {stats.pending} not acknowledged")


if __name__ == "__main__":
    asyncio.run(main())
