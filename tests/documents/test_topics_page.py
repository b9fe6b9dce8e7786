"""The page on topics names every key, script, option and metric there is, and is right about the fences."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from conquiet.metrics import NAMES
from conquiet.topics.operate.admin import Admin
from conquiet.topics.options import DeadLetterPolicy, Retention, SubscribeOptions
from conquiet.wire.keys import Keys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "topics.md").read_text(encoding="utf-8")
SCRIPTS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "conquiet/wire/lua").glob("*.lua")}
OTHERS = ("balance_", "jobs_")
WHOLE = {
    name: text for name, text in SCRIPTS.items() if not text.startswith("-- Fragment") and not name.startswith(OTHERS)
}
PLACES = {"topic": "T", "group": "G", "stream": "S", "index": "i", "write": "W", "batch": "n"}
LISTS = {"of_partition", "of_group"}
ROW = re.compile(r"^\| `(\w+)` \|.*\| (yes|no) \|$", re.MULTILINE)


def keys() -> dict[str, str]:
    """Each key as the page writes it, by the name of its method."""
    found: dict[str, str] = {}
    for name, member in vars(Keys).items():
        if name.startswith("_") or name in LISTS:
            continue
        if isinstance(member, property):
            found[name] = getattr(Keys(), name)
        elif inspect.isfunction(member):
            _, *wanted = inspect.signature(member).parameters
            found[name] = member(Keys(), *(PLACES[one] for one in wanted))
    return found


def test_there_is_something_to_look_for() -> None:
    assert {"registry", "lease", "trim"} <= keys().keys()
    assert {"take", "replay_end"} <= WHOLE.keys()
    assert "lease" in SCRIPTS.keys() - WHOLE.keys()


@pytest.mark.parametrize(("name", "key"), keys().items())
def test_every_key_has_its_row(name: str, key: str) -> None:
    assert f"\n| `{key}` |" in PAGE, f"Keys.{name}"


def test_every_script_has_its_row_and_no_other() -> None:
    assert dict(ROW.findall(PAGE)).keys() == WHOLE.keys()


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_scripts_are_fenced_as_the_page_says(name: str) -> None:
    fenced = "not holds(" in WHOLE[name]
    assert dict(ROW.findall(PAGE))[name] == ("yes" if fenced else "no")


@pytest.mark.parametrize("options", [SubscribeOptions, Retention])
def test_every_option_has_its_row(options: type) -> None:
    rows = "".join(row for row in PAGE.splitlines() if row.startswith("| `"))
    for option in dataclasses.fields(options):
        assert f"`{option.name}`" in rows


def test_every_choice_about_dead_letters_is_named() -> None:
    for choice in dataclasses.fields(DeadLetterPolicy):
        assert f"{choice.name}=" in PAGE


def test_every_method_of_the_administration_is_named() -> None:
    for name, member in vars(Admin).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert f"`{name}(" in PAGE


def test_every_metric_is_named() -> None:
    for name in NAMES:
        if name.startswith("conquiet_topics_"):
            assert f"`{name}`" in PAGE
