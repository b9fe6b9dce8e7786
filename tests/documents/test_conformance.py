"""The table of rules is the one that the tests make, and covers both specifications."""

from __future__ import annotations

from tests.documents.conformance import PAGE, order, page, rules

SECTIONS = {
    "1": ["2", "3", "4", "5.2", "5.3", "5.4", "5.5", "5.6", "6", "7", "8"],
    "2": ["1.1", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12"],
}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.documents.conformance"


def test_every_section_with_rules_is_held_by_a_test() -> None:
    found = rules()
    for spec, sections in SECTIONS.items():
        held = {
            ".".join(map(str, order(section)[:depth]))
            for places, _, _ in found[spec]
            for section in places.split(", ")
            for depth in (1, 2)
        }
        assert set(sections) <= held
