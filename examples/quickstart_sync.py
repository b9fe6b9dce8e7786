"""The same as quickstart.py, without async."""

from __future__ import annotations

from conquiet.sync import EmbeddedRedis, QueueConfig, QueueConsumer, RedisStreamsQueue


def main() -> None:
    config = QueueConfig(stream_key="orders", consumer_group="billing", consumer_name="billing-1")
    # With a Redis of your own: RedisStreamsQueue.connect("redis://localhost:6379", config)
    with EmbeddedRedis() as server, RedisStreamsQueue.connect(server.url, config) as queue:
        queue.enqueue({"order": 1, "amount": "12.50"})
        queue.enqueue_many([{"order": number, "amount": "9.99"} for number in range(2, 6)])

        with QueueConsumer(queue) as consumer:
            for message in consumer.iter_messages():
                print(f"order {message.payload['order']}: {message.payload['amount']}")
                consumer.ack(message)
                if message.payload["order"] == 5:
                    consumer.stop()

        stats = queue.backlog_stats()
        print(f"{stats.length} in the stream, {stats.pending} not acknowledged")


if __name__ == "__main__":
    main()
