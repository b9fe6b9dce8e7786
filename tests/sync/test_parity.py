"""The facade is the core without ``await``, and stays so."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar, get_type_hints

import pytest

import conquiet
import conquiet.sync
from conquiet.balance.events import StreamEvent
from conquiet.balance.running import StreamHandler
from conquiet.jobs.worker import JobHandler
from conquiet.sync._bridge import Bridge, Facade, blocking, items, passing
from conquiet.sync._jobs import Store
from conquiet.topics.consume.handling import BatchHandler, Handler
from tests.sync.parity import Freedom, drift

SHARED: Final = [name for name in conquiet.__all__ if getattr(conquiet, name) is getattr(conquiet.sync, name)]
PAIRED: Final = [name for name in conquiet.__all__ if name not in SHARED]
SUBCLASSES: Final = ("Delivery", "StreamLease")
FACADES: Final = [name for name in PAIRED if name not in SUBCLASSES]
OF_A_STORE: Final = frozenset(
    {
        *("add", "apart", "cancel", "claim", "clone", "counts", "delete", "find", "finished", "leased", "news", "page"),
        *("purge", "renew", "replay", "settle"),
    }
)
"""What queues and workers ask of a store: users have no need of it."""

FORMER_NAMES: Final = {"Keep": "JobRetention"}

_Tx = TypeVar("_Tx", bound=conquiet.DbTx)

FREEDOM: Final = Freedom(
    renames={"aclose": "close"},
    annotations={
        # Nobody awaits what a handler returns here.
        "QueueConsumer.run.handler": (
            Callable[[conquiet.QueueMessage, _Tx], Awaitable[None] | None],
            Callable[[conquiet.QueueMessage, _Tx], None],
        ),
        "QueueConsumer.iter_messages.return": (AsyncIterator[conquiet.QueueMessage], Iterator[conquiet.QueueMessage]),
        "Broker.subscribe.handler": (
            Handler | BatchHandler,
            Callable[[conquiet.Message], None]
            | Callable[[list[conquiet.Message]], Sequence[BaseException | None] | None],
        ),
        "Messages.__iter__.return": (AsyncIterator[conquiet.Delivery], Self),
        "JobQueue.__init__.store": (conquiet.JobStore, Store),
        "JobQueue.store.return": (conquiet.JobStore, Store),
        "JobWorker.__init__.handler": (JobHandler, Callable[[conquiet.Job], Any]),
        "StreamBalancer.events.return": (AsyncIterator[StreamEvent], Iterator[StreamEvent]),
        "StreamBalancer.owned.return": (
            Mapping[str, conquiet.StreamLease],
            Mapping[str, conquiet.sync.StreamLease],
        ),
        "StreamBalancer.run.handler": (StreamHandler, Callable[[str, conquiet.sync.StreamLease], Any]),
        "Messages.next.return": (conquiet.Delivery | None, conquiet.sync.Delivery | None),
    },
    hidden={
        "JobQueue": frozenset({"dispatch"}),
        "MemoryStore": OF_A_STORE,
        "PostgresStore": OF_A_STORE | {"__reduce__", "__repr__"},
        "RedisStore": OF_A_STORE,
    },
    made_by_others=frozenset({"Admin", "Messages", "Subscription"}),
    twins={getattr(conquiet, name): getattr(conquiet.sync, name) for name in PAIRED},
)


def test_both_apis_have_the_same_names() -> None:
    assert conquiet.sync.__all__ == conquiet.__all__ == sorted(set(conquiet.__all__))


def test_every_name_is_there_and_documented() -> None:
    things = [(name, getattr(api, name)) for api in (conquiet, conquiet.sync) for name in conquiet.__all__]
    assert [name for name, thing in things if not inspect.isclass(thing)] == []
    assert [name for name, thing in things if not thing.__doc__] == []
    assert [name for name, thing in things if thing.__name__ != FORMER_NAMES.get(name, name)] == []


def test_what_has_a_facade() -> None:
    assert [
        *("Admin", "Broker", "Delivery", "EmbeddedRedis", "JobQueue", "JobWorker", "MemoryStore", "Messages"),
        *("PostgresStore", "QueueConsumer", "RedisStore", "RedisStreamsQueue", "StreamBalancer", "StreamLease"),
        "Subscription",
    ] == PAIRED


@pytest.mark.parametrize("name", FACADES)
def test_a_facade_is_its_core_without_await(name: str) -> None:
    assert drift(getattr(conquiet, name), getattr(conquiet.sync, name), FREEDOM) == []


@pytest.mark.parametrize("name", ["ack", "reject", "retry"])
def test_a_delivery_is_settled_without_await(name: str) -> None:
    core, plain = getattr(conquiet.Delivery, name), getattr(conquiet.sync.Delivery, name)
    assert inspect.iscoroutinefunction(core)
    assert not inspect.iscoroutinefunction(plain)
    assert inspect.signature(core) == inspect.signature(plain)


def test_a_delivery_has_nothing_else_to_await() -> None:
    awaited = {name for name in dir(conquiet.Delivery) if inspect.iscoroutinefunction(getattr(conquiet.Delivery, name))}
    assert awaited == {"ack", "reject", "retry"}


@pytest.mark.parametrize("name", PAIRED)
def test_a_facade_has_the_documentation_of_its_core(name: str) -> None:
    assert getattr(conquiet.sync, name).__doc__ == getattr(conquiet, name).__doc__


@pytest.mark.parametrize("name", PAIRED)
def test_its_members_have_the_documentation_of_the_core(name: str) -> None:
    core, facade = getattr(conquiet, name), getattr(conquiet.sync, name)
    hidden = FREEDOM.hidden.get(name, frozenset())
    shown = [member for member in dir(core) if not member.startswith("_") and member not in hidden]
    names = {member: FREEDOM.renames.get(member, member) for member in shown}
    differing = [
        mine
        for theirs, mine in names.items()
        if inspect.getdoc(inspect.getattr_static(facade, mine)) != inspect.getdoc(inspect.getattr_static(core, theirs))
    ]
    assert differing == []


def test_a_bound_method_tells_how_it_is_called() -> None:
    """To people in a notebook, and to whatever looks at signatures."""
    config = conquiet.QueueConfig("s", "g", "c")
    core = conquiet.RedisStreamsQueue("redis://localhost", config)
    facade = conquiet.sync.RedisStreamsQueue("redis://localhost", config)
    assert inspect.signature(facade.read) == inspect.signature(core.read)
    assert inspect.getdoc(facade.read) == inspect.getdoc(core.read)


@pytest.mark.parametrize("name", FACADES)
def test_its_methods_tell_how_they_are_called_without_an_object(name: str) -> None:
    """To ``help()``, to notebooks, and to whatever looks at signatures."""
    facade = getattr(conquiet.sync, name)
    bridges = {one: bridge for one in dir(facade) if isinstance(bridge := inspect.getattr_static(facade, one), Bridge)}
    shown = pydoc.plain(pydoc.render_doc(facade))
    for one, bridge in bridges.items():
        method = getattr(facade, one)
        assert inspect.isfunction(method)
        assert not inspect.iscoroutinefunction(method)
        assert inspect.signature(method) == inspect.signature(bridge.method)
        assert get_type_hints(method) == get_type_hints(bridge.method)
        assert f"{one}{inspect.signature(bridge.method)}" in shown.replace(
            f"{one} = {bridge.method.__name__}(", f"{one}("
        )


def test_what_both_apis_share_needs_no_await() -> None:
    shared = {name: getattr(conquiet, name) for name in SHARED if name != "JobStore"}  # what only the core calls
    methods = [
        (f"{name}.{one}", inspect.getattr_static(owner, one)) for name, owner in shared.items() for one in dir(owner)
    ]
    awaited = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    assert [name for name, method in methods if any(check(method) for check in awaited)] == []


# --- the check notices ----------------------------------------------------------------------------------------------


class Core:
    """Made up."""

    LIMIT = 5

    def __init__(self, size: int, *, name: str = "a") -> None:
        self._size = size
        self._name = name

    @classmethod
    def made(cls, size: int = 1) -> Self:
        """One."""
        return cls(size)

    @property
    def size(self) -> int:
        """How much."""
        return self._size

    async def fetch(self, count: int = 1, *rest: str, block: bool = False) -> list[int]:
        """Some."""
        return [count, len(rest), block]

    async def ask(self, what: str, *, twice: bool = False) -> str:
        """By a def in the facade, so that its signature is compared."""
        return what * (1 + twice)

    def stop(self) -> None:
        """No more."""

    async def aclose(self) -> None:
        """Done."""

    async def each(self, step: int = 1) -> AsyncIterator[int]:
        """One by one."""
        yield step

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Twin(Facade[Core]):
    """As it should be."""

    LIMIT = Core.LIMIT

    def __init__(self, size: int, *, name: str = "a") -> None:
        super().__init__(Core, size, name=name)

    @classmethod
    def made(cls, size: int = 1) -> Self:
        return cls(size)

    @property
    def size(self) -> int:
        return self._core().size

    fetch = blocking(Core.fetch)
    stop = passing(Core.stop)
    close = blocking(Core.aclose)

    def ask(self, what: str, *, twice: bool = False) -> str:
        return what * (1 + twice)

    def each(self, step: int = 1) -> Iterator[int]:
        yield from items(self._core().each(step))


MADE_UP: Final = Freedom(
    renames={"aclose": "close"},
    annotations={"Twin.each.return": (AsyncIterator[int], Iterator[int])},
)


def test_the_check_finds_nothing_where_nothing_is() -> None:
    assert drift(Core, Twin, MADE_UP) == []
    with Twin.made() as twin:
        assert (twin.fetch(2), twin.ask("a", twice=True), list(twin.each(3)), twin.size) == (
            [2, 0, False],
            "aa",
            [3],
            1,
        )


def mutated(**changes: object) -> type:
    """``Twin`` with other members, and without those that are ``None``."""
    members: dict[str, Any] = {**vars(Twin), **changes}
    kept = {
        name: member
        for name, member in members.items()
        if member is not None and name not in ("__dict__", "__weakref__", "__orig_bases__", "__parameters__")
    }
    return type("Twin", (Facade,), {**kept, "__orig_bases__": (Facade[Core],)})


def _other_default(self: Any, what: str, *, twice: bool = True) -> str:
    return what


def _other_kind(self: Any, what: str, twice: bool = False) -> str:
    return what


def _other_name(self: Any, which: str, *, twice: bool = False) -> str:
    return which


def _one_less(self: Any, what: str) -> str:
    return what


def _one_more(self: Any, what: str, *, twice: bool = False, more: int = 0) -> str:
    return what


def _other_annotation(self: Any, what: bytes, *, twice: bool = False) -> str:
    return str(what)


def _other_result(self: Any, what: str, *, twice: bool = False) -> bytes:
    return what.encode()


def _unannotated(self, what, *, twice=False):  # type: ignore[no-untyped-def]
    return what


async def _still_async(self: Any, what: str, *, twice: bool = False) -> str:
    return what


def _other_init(self: Any, size: int, *, name: str = "b") -> None: ...


def _no_iterator(self: Any, step: int = 1) -> Iterator[int]:
    return iter([step])


def _size_of_other_type(self: Any) -> str:
    return ""


def _set_size(self: Any, size: int) -> None: ...


MUTATIONS: Final[dict[str, tuple[dict[str, object], str]]] = {
    "a method is missing": ({"fetch": None}, "fetch is missing"),
    "a property is missing": ({"size": None}, "size is missing"),
    "a rename is not made": ({"close": None, "aclose": blocking(Core.aclose)}, "close is missing"),
    "a method is extra": ({"more": _other_name}, "more is extra"),
    "an operator is extra": ({"__len__": lambda self: 0}, "__len__ is extra"),
    "a coroutine is passed": ({"fetch": passing(Core.fetch)}, "fetch: is passing, not blocking"),
    "a function is awaited": ({"stop": blocking(Core.stop)}, "stop: is blocking, not passing"),  # type: ignore[arg-type]
    "another method is bridged": ({"fetch": blocking(Core.ask)}, "fetch: bridges another function than the core's"),
    "an iterator is bridged": ({"each": passing(Core.each)}, "each: bridges an iterator, which needs a def"),
    "a property is bridged": ({"size": passing(Core.stop)}, "size: bridges a property, not a method"),
    "a default drifts": ({"ask": _other_default}, "ask: twice defaults to True, not False"),
    "a kind drifts": ({"ask": _other_kind}, "ask: twice is positional or keyword, not keyword-only"),
    "a name drifts": (
        {"made": classmethod(_other_name)},
        "made: takes ['self', 'which', 'twice'] instead of ['cls', 'size']",
    ),
    "a parameter is dropped": ({"ask": _one_less}, "ask: takes ['self', 'what'] instead of ['self', 'what', 'twice']"),
    "a parameter is added": (
        {"ask": _one_more},
        "ask: takes ['self', 'what', 'twice', 'more'] instead of ['self', 'what', 'twice']",
    ),
    "a type drifts": (
        {"ask": _other_annotation},
        "ask: what is annotated <class 'bytes'>, and in the core <class 'str'>",
    ),
    "a result drifts": (
        {"ask": _other_result},
        "ask: return is annotated <class 'bytes'>, and in the core <class 'str'>",
    ),
    "the types are missing": ({"ask": _unannotated}, "ask: what is annotated None, and in the core <class 'str'>"),
    "a method is still async": ({"ask": _still_async}, "ask: is async in the facade"),
    "the constructor drifts": ({"__init__": _other_init}, "__init__: name defaults to 'b', not 'a'"),
    "an iterator is none": ({"each": _no_iterator}, "each: iterates in the core only"),
    "a property's type drifts": (
        {"size": property(_size_of_other_type)},
        "size: return is annotated <class 'str'>, and in the core <class 'int'>",
    ),
    "a property can be set": (
        {"size": property(Core.size.fget, _set_size)},  # type: ignore[attr-defined]
        "size: fset is only in the facade",
    ),
    "a constant drifts": ({"LIMIT": 6}, "LIMIT: a int in the core, a int in the facade"),
    "a class method is none": ({"made": _other_name}, "made: a classmethod in the core, a function in the facade"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_fires_when(mutation: str) -> None:
    changes, problem = MUTATIONS[mutation]
    assert problem in drift(Core, mutated(**changes), MADE_UP)


def test_the_check_fires_when_the_facade_is_of_another_core() -> None:
    class Stranger:
        """Has nothing."""

    assert "Twin is no Facade[Stranger]" in drift(Stranger, Twin, MADE_UP)


def test_the_check_fires_when_a_freedom_is_not_taken() -> None:
    needless = {**MADE_UP.annotations, "Twin.ask.what": (str, bytes)}
    assert drift(Core, Twin, replace(MADE_UP, annotations=needless)) == [
        "ask: what is annotated <class 'str'>, and in the core <class 'str'>"
    ]


def test_the_check_fires_when_a_freedom_is_for_something_else() -> None:
    stale = {"Twin.each.return": (AsyncIterator[str], Iterator[int])}
    assert [problem.split(":")[0] for problem in drift(Core, Twin, replace(MADE_UP, annotations=stale))] == ["each"]


def test_without_a_mutation_it_does_not() -> None:
    assert drift(Core, mutated(), MADE_UP) == []
