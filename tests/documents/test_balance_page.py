"""The page on balanced streams names every key, script, option, event and metric, and is right about fences."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from conquiet import StreamBalancer, StreamLease
from conquiet.balance.events import StreamEvent
from conquiet.metrics import NAMES
from conquiet.wire.keys import BalanceKeys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "balance.md").read_text(encoding="utf-8")
SCRIPTS = {
    path.stem: text
    for path in (ROOT / "conquiet/wire/lua").glob("balance_*.lua")
    if not (text := path.read_text(encoding="utf-8")).startswith("-- Fragment")
}
STATE = (ROOT / "conquiet/wire/lua/balance_state.lua").read_text(encoding="utf-8")
SCRIPT_ROW = re.compile(r"^\| `(balance_\w+)` \|.*\| (yes|no) \|$", re.MULTILINE)
METRIC_ROW = re.compile(r"^\| `(conquiet_\w+)` \|", re.MULTILINE)
FENCE = re.compile(r"\bif (not )?has\(|== epoch \.\. '\|' \.\. owner")


def keys() -> dict[str, str]:
    """Each key as the page writes it, by the name of its property."""
    made = BalanceKeys("V")
    found = {name: getattr(made, name) for name, member in vars(BalanceKeys).items() if isinstance(member, property)}
    del found["group"]
    return {**found, "mutex": f"{found['mutex']}Z"}


@pytest.mark.parametrize(("name", "key"), keys().items())
def test_every_key_has_its_row(name: str, key: str) -> None:
    assert f"\n| `{key}` |" in PAGE, f"BalanceKeys.{name}"


def test_no_other_key_has_one() -> None:
    section = PAGE.partition("\n## Keys\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)) == set(keys().values())
    assert f"`{BalanceKeys('V').group}`" in section
    field = re.search(r"FIELD = '(.+?)'", STATE)
    assert field
    assert f"`{field[1]}`" in section


def test_every_script_has_its_row_and_no_other() -> None:
    assert dict(SCRIPT_ROW.findall(PAGE)).keys() == SCRIPTS.keys()
    assert "balance_sweep" in SCRIPTS


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts_are_fenced_as_the_page_says(name: str) -> None:
    assert dict(SCRIPT_ROW.findall(PAGE))[name] == ("yes" if FENCE.search(SCRIPTS[name]) else "no")


def test_every_option_has_its_row_with_its_default() -> None:
    for name, option in inspect.signature(StreamBalancer).parameters.items():
        if name not in ("client", "lease"):
            row = re.search(rf"^\| `{name}` \| (.*?) \|", PAGE, re.MULTILINE)
            assert row, name
            if isinstance(option.default, bool | int | float):
                assert row[1] == str(option.default).lower(), name


@pytest.mark.parametrize("event", get_args(StreamEvent))
def test_every_event_has_its_row_with_its_fields(event: type) -> None:
    [row] = re.findall(rf"^\| `{event.__name__}` \|.*$", PAGE, re.MULTILINE)
    for field in dataclasses.fields(event):
        assert field.name in ("stream", "info") or f"`{field.name}`" in row


def test_every_metric_has_its_row_and_no_other() -> None:
    assert set(METRIC_ROW.findall(PAGE)) == {name for name in NAMES if name.startswith("conquiet_balance_")}


@pytest.mark.parametrize("cls", [StreamBalancer, StreamLease])
def test_every_method_is_named(cls: type) -> None:
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and not name.startswith("_") and name not in ("open", "end"):
            assert re.search(rf"\b{name}\b", PAGE), name
