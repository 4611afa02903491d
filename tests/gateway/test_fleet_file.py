"""`fleet.toml`: each mistake has its line, the draw is as even and as steady as phased updates need it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.config import config_file
from gateway.fleet_file import Fleet, Group, is_within, load, load_known, parse, with_changes
from gateway.toml_files.mistakes import ConfigError
from gateway.toml_files.writer import toml_text

PATH = Path("fleet.toml")
WHOLE = """\
serial = 7

[[groups]]
name = "first"
gateways = ["north/barn-1", "south/*"]
version = "1.2.0"
share = 10
hours = "22:00-05:00"

[groups.settings.kafka]
linger_ms = 100

[[groups]]
name = "others"
gateways = ["*/*"]

[groups.settings]
routes = [{ topic = "device/{device}/{stream}", kafka = "device-{stream}" }]
"""


def test_a_gateway_belongs_to_the_first_group_that_names_it() -> None:
    fleet = parse(WHOLE, PATH)
    assert fleet.serial == 7
    first, others = fleet.groups
    assert (first.version, first.share, first.settings) == ("1.2.0", 10, {"kafka": {"linger_ms": 100}})
    assert fleet.group_of("south/mill") is first
    assert fleet.group_of("north/barn-2") is others
    assert Fleet(1, (first,)).group_of("north/barn-2") is None


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("serial = 7", "", 0, "serial: is missing"),
        ("serial = 7", "serial = 0", 1, "a whole number from 1"),
        ("share = 10", "share = 101", 7, "per cent"),
        ("share = 10", "shares = 10", 7, "write 'share' instead"),
        ('hours = "22:00-05:00"', 'hours = "10pm"', 8, "hours of the day in UTC"),
        ('"north/barn-1"', '"barn-1"', 5, '"barn-1" is no gateway'),
        ('"*/*"', '"south/*"', 15, 'is in the group "first" too'),
        ('["*/*"]', "[]", 15, "is empty"),
        ('name = "others"', 'name = "first"', 14, "another group's name too"),
        ('version = "1.2.0"', 'version = "latest"', 6, "a version"),
        ("linger_ms = 100", "linger_ms = -1", 11, "milliseconds"),
        ("linger_ms = 100", "linger = 100", 11, "write 'linger_ms' instead"),
        (', kafka = "device-{stream}"', "", 18, "kafka: is missing"),
        ("[groups.settings.kafka]\nlinger_ms = 100", '[groups.settings.gateway]\nid = "x"', 11, "each box's own name"),
        (
            "[groups.settings.kafka]\nlinger_ms = 100",
            '[groups.settings.fleet]\nurl = "https://a.example"',
            10,
            "could not be mended from afar",
        ),
        (
            "[groups.settings.kafka]\nlinger_ms = 100",
            '[[groups.settings.mqtt_brokers]]\nhost = "h"\ntopics = ["a"]\npassword = "secret"',
            13,
            "is a secret",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(before: str, after: str, line: int, words: str, tmp_path: Path) -> None:
    assert before in WHOLE
    (tmp_path / PATH).write_text(WHOLE.replace(before, after, 1))
    with pytest.raises(ConfigError) as told:
        load_known(tmp_path / PATH)
    (mistake,) = told.value.mistakes
    assert mistake.line == line, mistake.message
    assert words in mistake.message
    assert "secret" not in mistake.message.replace("is a secret", "")


def test_settings_of_another_version_are_no_mistake_of_the_file() -> None:
    parse(WHOLE.replace("linger_ms = 100", "linger = 100"), PATH)
    with pytest.raises(ConfigError, match="could not be mended"):
        parse(WHOLE.replace("[groups.settings.kafka]", "[groups.settings.fleet]"), PATH)


def test_a_group_wants_something() -> None:
    with pytest.raises(ConfigError, match=r"fleet.toml:2: groups\[0\]: wants nothing"):
        parse('serial = 1\n[[groups]]\nname = "a"\ngateways = ["a/b"]\n', PATH)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load(tmp_path / "fleet.toml")


GROUP = Group("first", ("*/*",), version="1.2.0")


@given(version=st.text("0123456789.", min_size=1, max_size=8), share=st.integers(0, 100), more=st.integers(0, 100))
def test_a_larger_share_has_all_of_a_smaller_one(version: str, share: int, more: int) -> None:
    small = replace(GROUP, version=version, share=min(share, more))
    large = replace(small, share=max(share, more))
    gateways = [f"north/{number}" for number in range(200)]
    drawn = {gateway for gateway in gateways if small.is_drawn(gateway)}
    assert drawn <= {gateway for gateway in gateways if large.is_drawn(gateway)}
    assert all(replace(small, share=100).is_drawn(gateway) for gateway in gateways)
    assert not any(replace(small, share=0).is_drawn(gateway) for gateway in gateways)


def test_a_share_is_about_so_large_and_another_one_for_each_version() -> None:
    gateways = [f"north/{number}" for number in range(10_000)]
    drawn = [
        {gateway for gateway in gateways if replace(GROUP, version=version, share=10).is_drawn(gateway)}
        for version in ("1.2.0", "1.3.0")
    ]
    # Five standard deviations of a binomial share of a tenth.
    assert all(abs(len(each) - 1_000) < 150 for each in drawn)
    assert abs(len(drawn[0] & drawn[1]) - 100) < 50, "no gateway is always among the first"


def test_another_attempt_is_for_those_that_were_drawn_before() -> None:
    gateways = [f"north/{number}" for number in range(200)]
    first, again = (replace(GROUP, version="1.2.0", share=10, attempt=attempt) for attempt in (1, 2))
    assert [first.is_drawn(each) for each in gateways] == [again.is_drawn(each) for each in gateways]


def test_another_wish_has_another_digest() -> None:
    others: list[dict[str, Any]] = [{"version": "1.2.1"}, {"settings": {"log": {"level": "debug"}}}, {"attempt": 2}]
    assert len({GROUP.wish, *(replace(GROUP, **other).wish for other in others)}) == 4
    assert replace(GROUP, share=5, hours="00:00-01:00", name="second").wish == GROUP.wish


@pytest.mark.parametrize(
    ("hours", "at", "within"),
    [
        (None, "12:00", True),
        ("01:00-05:00", "00:59", False),
        ("01:00-05:00", "01:00", True),
        ("01:00-05:00", "05:00", False),
        ("22:00-05:00", "23:30", True),
        ("22:00-05:00", "04:59", True),
        ("22:00-05:00", "12:00", False),
        ("03:00-03:00", "12:00", True),
    ],
)
def test_hours_may_go_over_midnight(hours: str | None, at: str, within: bool) -> None:  # noqa: FBT001 - a table's column
    moment = datetime(2026, 1, 1, int(at[:2]), int(at[3:]), tzinfo=UTC)
    assert is_within(hours, moment) is within


_names = st.text("abc", min_size=1, max_size=1)
_documents = st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(_names, inner, max_size=3), max_leaves=8
).filter(lambda value: isinstance(value, dict))


@given(_documents, _documents)
def test_changes_hold_afterwards_and_the_rest_stays(document: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    merged = with_changes(document, changes)
    assert with_changes(merged, changes) == merged
    assert {name: merged[name] for name in document.keys() - changes.keys()} == {
        name: document[name] for name in document.keys() - changes.keys()
    }
    assert with_changes(document, {}) == document


def test_a_change_of_each_section_is_taken_as_gateway_toml_takes_it() -> None:
    document = {"gateway": {"id": "barn-1"}, "kafka": {"bootstrap": ["k:9092"]}}
    changes = {"mqtt_listener": {"anonymous": True}, "kafka": {"drain": "oldest-first"}, "log": {"level": "debug"}}
    text = toml_text({"serial": 1, "groups": [{"name": "a", "gateways": ["a/b"], "settings": changes}]}, {})
    (group,) = parse(text, PATH).groups
    settings = config_file.parse(toml_text(with_changes(document, group.settings), {}), Path("gateway.toml"))
    assert (settings.kafka.drain, settings.log.level, settings.kafka.bootstrap) == (
        "oldest-first",
        "debug",
        ("k:9092",),
    )
