"""Names that break our rule, escaped and back."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.intake.escaped_names import escape, original, original_device
from gateway.record_contract import DEVICE_NAME

FOREIGN = {
    "Wohnzimmer Lampe": "x--Wohnzimmer-20-Lampe",
    "aa:bb:cc:dd:ee:ff": "x--aa-3A-bb-3A-cc-3A-dd-3A-ee-3A-ff",
    "00:12:4b:00:1f:2e:3d:4c": "x--00-3A-12-3A-4b-3A-00-3A-1f-3A-2e-3A-3d-3A-4c",
    "app@ttn": "x--app-40-ttn",
    "Küche": "x--K-C3BC-che",
    "_hidden": "x--_hidden",
    "-7": "x---2D-7",
    "x--a-20-b": "x--x-2D2D-a-2D-20-2D-b",
    "x--": "x--x-2D2D-",
}


@pytest.mark.parametrize(("name", "escaped"), FOREIGN.items())
def test_a_foreign_name_is_written_by_the_rule_of_names_and_read_back(name: str, escaped: str) -> None:
    assert escape(name) == escaped
    assert DEVICE_NAME.fullmatch(escaped)
    assert original(escaped) == name


@pytest.mark.parametrize("name", ["42", "living-room", "a.b_c--d", "X--y", "x-y", "ab" * 40])
def test_a_name_that_keeps_the_rule_stays_as_it_is(name: str) -> None:
    assert escape(name) == name
    assert original(name) is None


@pytest.mark.parametrize(
    "name", ["x--ab", "x--a-2-b", "x--a-zz-b", "x--a-c3bc-b", "x--a-FF-b", "x--a-41-b", "x--a--b", "x--a-C3--BC-b"]
)
def test_what_escape_does_not_write_is_nobodys_original(name: str) -> None:
    assert original(name) is None


def test_each_part_of_a_devices_name_is_read_back() -> None:
    assert original_device("x--B-C3BC-ro-20-1/x--app-40-ttn") == "Büro 1/app@ttn"
    assert original_device("north/x--app-40-ttn") == "north/app@ttn"
    assert original_device("north/42") is None


@given(st.text(min_size=1), st.text(min_size=1))
@example("x--a-20-b", "a b")
@example("a-", "a--2D")
def test_no_two_names_become_one_and_each_can_be_read_back(one: str, other: str) -> None:
    escaped = escape(one)
    assert (escaped == escape(other)) == (one == other)
    assert (original(escaped) or escaped) == one
    assert len(escaped) > 63 or DEVICE_NAME.fullmatch(escaped)
    assert escape(escaped) == escaped or original(escape(escaped)) == escaped


@given(st.from_regex(r"\A(x--)?[A-Z0-9x-]{0,12}\Z"))
def test_names_that_look_escaped_are_kept_apart_too(name: str) -> None:
    read = original(name)
    assert read is None or escape(read) == name
