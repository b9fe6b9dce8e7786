"""What an operator sees and can do, in a plain script: list, describe, lag, pending, grow, trim, reset, delete."""

from __future__ import annotations

from conquiet.sync import Broker, EmbeddedRedis, Outgoing, Retention, SubscribeOptions


def show_group(broker: Broker) -> None:
    group = broker.admin.describe_group("orders", "billing")
    print(f"group {group.group}: lag {group.lag}, pending {group.pending}, {group.consumers} consumers")
    for part in group.partitions:
        print(f"  partition {part.index}: lag {part.lag}, pending {part.pending}, owner {part.owner}")


def take(broker: Broker, count: int, acknowledge: int) -> None:
    """Pull messages and acknowledge some; the others, and what was fetched ahead, stay pending when this leaves."""
    options = SubscribeOptions(consumer="billing-1", max_inflight=10)
    with broker.consume("orders", group="billing", options=options) as messages:
        for taken, message in enumerate(messages, start=1):
            if taken <= acknowledge:
                message.ack()
            if taken == count:
                show_group(broker)
                return


def main() -> None:
    with EmbeddedRedis() as server, Broker.connect(server.url) as broker:
        admin = broker.admin
        broker.create_topic("orders", partitions=2, retention=Retention(max_len=1_000_000))
        broker.send_batch("orders", [Outgoing({"order": number}, key=str(number)) for number in range(100)])
        print("topics:", *admin.list_topics())
        topic = admin.describe_topic("orders")
        lengths = [part.length for part in topic.by_partition]
        print(f"orders: {topic.length} messages, by partition {lengths}")

        take(broker, count=10, acknowledge=8)
        for entry in admin.pending("orders", "billing", count=2).entries:
            print(f"  pending: {entry.id} in partition {entry.partition}, delivered to {entry.consumer}")

        print(f"grown to {admin.grow('orders', partitions=4).partitions} partitions")
        print(f"trimmed {admin.trim('orders', max_len=10)}: no more than the group has finished")

        admin.reset_group("orders", "billing", to="latest")
        show_group(broker)
        print(f"trimmed {admin.trim('orders', max_len=10)}")

        admin.delete_group("orders", "billing")
        print("groups:", admin.list_groups("orders"))
        admin.delete_topic("orders")
        print("topics:", admin.list_topics())


if __name__ == "__main__":
    main()
