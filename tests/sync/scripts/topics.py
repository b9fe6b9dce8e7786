"""Consumers of topics in processes that are interrupted, fork, send objects away or just end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from conquiet.sync import Admin, Broker, Message, Outgoing, SubscribeOptions, Subscription
from tests.sync.looking import LONG, until
from tests.sync.scripts import say, watch_over

__all__ = [
    "ending",
    "ending_busily",
    "exiting",
    "forking",
    "forking_handler",
    "handling",
    "pulling",
    "spawning",
    "waiting",
]


def _options(**options: Any) -> SubscribeOptions:
    return SubscribeOptions(poll_timeout=0.1, lease_ttl=600.0, **options)


def _state(broker: Broker) -> str:
    info = broker.admin.describe_group("orders", "g")
    return f"pending {info.pending} members {info.consumers} unowned {len(info.unowned)}"


def waiting(url: str, namespace: str, handle_signals: str, max_inflight: str) -> None:
    """In ``wait``, with nothing to handle; after an interrupt, once more."""
    options = _options(handle_signals=handle_signals == "True", max_inflight=int(max_inflight))
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        subscription.stop()

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders", partitions=2)
        with broker.subscribe("orders", group="g", handler=handle, options=options) as subscription:
            until(lambda: subscription.owned == {"orders": (0, 1)}, "its partitions")
            try:
                say("ready")
                subscription.wait()
                say("ended")
            except KeyboardInterrupt:
                say("interrupted", subscription.health().healthy)
                broker.send("orders", 1)
                subscription.wait()
                say("went on", *seen)
        say(_state(broker))
    say("signals as before", (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before)


def handling(url: str, namespace: str, handle_signals: str, max_inflight: str) -> None:
    """In ``wait``, while a message is being handled and more are there."""
    entered, finish = threading.Event(), threading.Event()
    options = _options(handle_signals=handle_signals == "True", max_inflight=int(max_inflight))

    def handle(message: Message) -> None:
        entered.wait(LONG)  # before that, nobody handles signals
        say("handling", threading.current_thread() is threading.main_thread())
        while not finish.is_set():
            time.sleep(0.01)  # in which signals are heard
        say("handled")

    signal.signal(signal.SIGUSR1, lambda number, frame: finish.set())
    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders")
        broker.send_batch("orders", [Outgoing(n, key="k") for n in range(3)])
        try:
            with broker.subscribe("orders", group="g", handler=handle, options=options) as subscription:
                entered.set()
                threading.Thread(target=_tell_stop, args=(subscription,), daemon=True).start()
                subscription.wait()
                finish.wait(LONG)
        except KeyboardInterrupt:
            say("interrupted")
        say(_state(broker))


def _tell_stop(subscription: Subscription) -> None:
    while subscription.health().healthy:
        time.sleep(0.01)  # between two looks
    say("stopping")


def pulling(url: str, namespace: str) -> None:
    """In a ``for`` loop over messages, with one in hand."""
    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders")
        broker.send("orders", 1)
        with broker.consume("orders", group="g", options=_options()) as messages:
            for message in messages:
                say("got", message.payload)
            say("ended")
        say(_state(broker))


def exiting(url: str, namespace: str, max_inflight: str) -> None:
    """A handler ends the program, as far as it can: the main thread is told, or its message has failed."""
    options = _options(handle_signals=False, max_inflight=int(max_inflight))

    def handle(message: Message) -> None:
        if message.retry_count == 0:
            sys.exit(3)
        subscription.stop()

    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders")
        broker.send("orders", 1)
        try:
            with broker.subscribe("orders", group="g", handler=handle, options=options) as subscription:
                subscription.wait()
        except SystemExit as error:
            say("told", error.code)
        else:
            say("failed")
        say("alive", broker.admin.list_topics())


_kept: list[Any] = []


def ending(url: str, namespace: str, max_inflight: str) -> None:
    """Leaves everything open, and ends."""
    broker = Broker.connect(url, namespace=namespace)
    broker.create_topic("orders")
    handled = threading.Event()
    options = _options(max_inflight=int(max_inflight))
    subscription = broker.subscribe("orders", group="g", handler=lambda message: handled.set(), options=options)
    subscription.__enter__()
    messages = broker.consume("orders", group="h", options=_options())
    messages.__enter__()
    broker.send("orders", 1)
    assert next(messages).payload == 1
    if max_inflight != "1":
        assert handled.wait(LONG)
    _kept.extend([broker, subscription, messages])
    say("leaving")


def ending_busily(url: str, namespace: str) -> None:
    """Ends while one handler is at work and much is left to do."""
    broker = Broker.connect(url, namespace=namespace)
    broker.create_topic("orders")
    begun, left = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        begun.set()
        left.wait(LONG)
        time.sleep(2.0)  # while the program ends, or waits for this with that

    broker.send("orders", 0)
    subscription = broker.subscribe("orders", group="g", handler=handle, options=_options(max_inflight=2))
    subscription.__enter__()
    assert begun.wait(LONG)
    broker.send_batch("orders", [Outgoing(n) for n in range(1, 20)])
    _kept.extend([broker, subscription])
    say("leaving")
    left.set()


# --- other processes ------------------------------------------------------------------------------------------------


def _fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        watch_over()  # the parent's watch has not come along
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _join(*pids: int) -> None:
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "a child has failed"


def forking(url: str, namespace: str) -> None:
    """Children send through the broker that they inherited, and consume on their own; the parent's consumer goes on."""
    seen: set[Any] = set()

    def handle(message: Message) -> None:
        seen.add(message.payload)

    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders", partitions=2)
        send, admin = broker.send, broker.admin
        options = SubscribeOptions(poll_timeout=0.1, lease_ttl=1.0, handle_signals=False)
        with broker.subscribe("orders", group="g", handler=handle, options=options) as subscription:
            broker.send("orders", "parent 0")
            until(lambda: "parent 0" in seen, "the first message")
            before = [part.epoch for part in admin.describe_group("orders", "g").partitions]

            def child(who: str) -> None:
                assert not subscription.health().healthy
                subscription.close()  # which is nothing of the parent's
                ids = [broker.send("orders", f"{who} 0"), send("orders", f"{who} 1")]
                ids += broker.send_batch("orders", [Outgoing(f"{who} 2")])
                assert len({(id.partition, str(id)) for id in ids}) == 3
                assert admin.list_topics() == ["orders"]
                with broker.consume("orders", group=who, options=options) as messages:
                    next(messages).ack()
                broker.close()

            pids = [_fork(lambda who=who: child(who)) for who in ("one", "other")]  # type: ignore[misc]
            broker.send("orders", "parent 1")
            _join(*pids)
            broker.send("orders", "parent 2")
            until(lambda: len(seen) == 9, "what all three have sent")
            assert subscription.health().healthy
            epochs = [part.epoch for part in admin.describe_group("orders", "g").partitions]
            assert epochs == before, "the parent has lost its leases in between"
        assert admin.list_groups("orders") == ["g", "one", "other"]
    say("fine")


def forking_handler(url: str, namespace: str) -> None:
    """A handler on the calling thread forks, and the child sends."""
    seen: list[Any] = []

    def handle(message: Message) -> None:
        seen.append(message.payload)
        if message.payload < 3:
            _join(_fork(lambda: broker.send("orders", message.payload + 1)))
        else:
            subscription.stop()

    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders")
        broker.send("orders", 0)
        with broker.subscribe("orders", group="g", handler=handle, options=_options(max_inflight=1)) as subscription:
            subscription.wait()
        assert seen == [0, 1, 2, 3]
        assert broker.admin.describe_group("orders", "g").pending == 0
    say("fine")


def spawning(url: str, namespace: str) -> None:
    """A process that shares nothing with this one gets a broker, its administration and a subscription."""
    with Broker.connect(url, namespace=namespace) as broker:
        broker.create_topic("orders")
        broker.send("orders", "parent")
        subscription = broker.subscribe("orders", group="g", handler=_note, options=_options(max_inflight=1))
        context = multiprocessing.get_context("spawn")
        results: Any = context.SimpleQueue()
        child = context.Process(target=_receive, args=(broker, broker.admin, subscription, results))
        child.start()
        child.join(LONG)
        assert child.exitcode == 0
        assert results.get() == ["parent", "child"]
        assert broker.admin.describe_group("orders", "g").pending == 0
        assert broker.admin.describe_topic("orders").length == 2
    say("fine")


_noted: list[Any] = []


def _note(message: Message) -> None:
    _noted.append(message.payload)


def _receive(broker: Broker, admin: Admin, subscription: Subscription, results: Any) -> None:
    watch_over()
    with broker:
        assert admin.list_topics() == ["orders"]
        broker.send("orders", "child")
        with subscription:
            threading.Thread(target=_stop_at, args=(subscription, 2), daemon=True).start()
            subscription.wait()
        results.put(_noted)


def _stop_at(subscription: Subscription, count: int) -> None:
    until(lambda: len(_noted) == count, "the messages")
    subscription.stop()
