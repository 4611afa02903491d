"""Members of readings are sent once they moved, and as they are after a silence."""

import json
from collections.abc import Sequence
from decimal import Decimal

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.serial_lines.changes import Changes

SILENCE_US = 900_000_000


def changes(**deadbands: float) -> Changes:
    return Changes(deadbands, SILENCE_US / 1e6)


def test_a_member_is_left_out_until_it_moved_by_more_than_its_deadband() -> None:
    sensor = changes(t=0.1, h=1)
    assert sensor.moved(b'{"t":21.50,"h":40,"id":"a"}', 0) == b'{"t":21.50,"h":40,"id":"a"}'
    assert sensor.moved(b'{"t":21.6,"h":41,"id":"a"}', 1) is None
    assert sensor.moved(b'{"t":21.61,"h":41,"id":"a"}', 2) == b'{"t":21.61,"id":"a"}'
    # It is compared with what was sent, so that a slow drift is seen.
    assert sensor.moved(b'{"t":21.70,"h":41.5,"id":"a"}', 3) == b'{"h":41.5,"id":"a"}'
    assert sensor.moved(b'{"t":21.72,"h":41.5,"id":"a"}', 4) == b'{"t":21.72,"id":"a"}'


def test_without_a_deadband_any_other_value_has_moved_and_the_same_number_has_not() -> None:
    sensor = changes(door=0)
    sent = [b"1", b"1.0", b"0", b'"open"', b'"shut"', b"null", b"null", b"true", b"[1,2]", b"1e999999999", b"-0"]
    told = [sensor.moved(b'{"door":%b}' % value, 0) is not None for value in sent]
    assert told == [True, False, True, True, True, True, False, True, True, True, True]


def test_after_the_longest_silence_a_member_is_sent_as_it_is() -> None:
    sensor = changes(t=5, h=5)
    sensor.moved(b'{"t":1,"h":1}', 0)
    assert sensor.moved(b'{"t":1,"h":9}', SILENCE_US - 1) == b'{"h":9}'
    assert sensor.moved(b'{"t":1,"h":9}', SILENCE_US) == b'{"t":1}'
    assert sensor.moved(b'{"t":1,"h":9}', SILENCE_US + 1) is None


def test_what_has_no_named_member_is_sent_as_it_is() -> None:
    sensor = changes(t=1)
    for payload in (b'{"h": 1}', b"{}", b"[1]", b'{"t":nan}', b"\xff", b""):
        assert sensor.moved(payload, 0) == sensor.moved(payload, 0) == payload


def test_after_a_loss_everything_is_sent_again() -> None:
    sensor = changes(t=1)
    assert sensor.moved(b'{"t":1}', 0) is not None
    assert sensor.moved(b'{"t":1}', 0) is None
    sensor.forget()
    assert sensor.moved(b'{"t":1}', 0) == b'{"t":1}'


@given(st.lists(st.binary(max_size=9) | st.text(max_size=9).map(str.encode), max_size=9))
@example([b"[" * 20_000])
def test_no_payload_raises(values: Sequence[bytes]) -> None:
    sensor = changes(t=1)
    for value in values:
        sensor.moved(value, 0)
        sensor.moved(b'{"t":%b}' % value, 0)
        sensor.moved(b'{"t":"%b"}' % value, 0)


@given(
    st.lists(st.decimals(-1000, 1000, places=3), min_size=1, max_size=30),
    st.decimals(0, 100, places=2),
)
def test_what_was_sent_last_is_never_off_by_more_than_the_deadband(
    values: Sequence[Decimal], deadband: Decimal
) -> None:
    sensor = changes(t=float(deadband))
    known = None
    for value in values:
        sent = sensor.moved(b'{"t":%b,"n":1}' % str(value).encode(), 0)
        if sent is not None:
            known = json.loads(sent, parse_float=Decimal, parse_int=Decimal)["t"]
        assert known is not None
        assert abs(value - known) <= deadband
