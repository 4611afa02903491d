"""What addresses may ask, and who may ask at all."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark.page.access import cookie_name, has_token, is_our_host
from spark.page.questions import POINTS, SIZES_S, QuestionError, question, suiting_size
from tests.support.spark_records import EPOCH, NOON

NOON_US = (NOON - EPOCH) // timedelta(microseconds=1)


def test_parameters_have_the_names_of_the_commands_options() -> None:
    asked = question(
        {"device": "42", "metric": "celsius", "since": "2026-03-14T13:00", "zone": "Europe/Berlin", "limit": "7"}
    )
    assert (asked.asked.device, asked.asked.metric, asked.asked.since_us, asked.limit) == ("42", "celsius", NOON_US, 7)
    assert asked.asked.until_us is None


def test_a_variable_that_grafana_left_empty_limits_nothing() -> None:
    asked = question({"device": "", "since": "2026-03-14T12:00:00.000Z", "size": "auto"})
    assert (asked.asked.device, asked.asked.since_us, asked.is_size_open) == (None, NOON_US, True)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"devcie": "42"}, "there is no parameter 'devcie': did you mean device?"),
        ({"since": "yesterday"}, "'yesterday' is no time; write 2026-03-14"),
        ({"last": "2 moons"}, "'2 moons' is no span of time; write 30min"),
        ({"last": "2h", "since": "2026-03-14"}, "leave out since and until"),
        ({"since": "2026-03-14", "until": "2026-03-14"}, "since is not before until"),
        ({"zone": "Mars/Base"}, "'Mars/Base' is no time zone"),
        ({"size": "-1"}, "size=-1 is no whole number"),
        ({"limit": "1e9"}, "limit=1e9 is no whole number"),
        ({"order": "random"}, "order=random is not one of newest, oldest"),
    ],
)
def test_mistakes_are_told_with_what_to_write(told: dict[str, str], words: str) -> None:
    with pytest.raises(QuestionError) as caught:
        question(told)
    assert words in str(caught.value)


@given(span_s=st.integers(1, 400 * 86_400), base_s=st.sampled_from(SIZES_S))
def test_windows_suit_their_span(span_s: int, base_s: int) -> None:
    size_s = suiting_size(span_s * 1_000_000, base_s)
    assert size_s % base_s == 0
    assert 86_400 % size_s == 0
    assert size_s == 86_400 or span_s / size_s <= POINTS
    smaller = [each for each in SIZES_S if each < size_s and each >= base_s and each % base_s == 0]
    assert all(span_s / each > POINTS for each in smaller)


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "LOCALHOST:8765"])
def test_its_own_name_is_let_in(host: str) -> None:
    assert is_our_host(host, 8765)


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:8765", "127.0.0.1", "127.0.0.1:8766", "[::1]:8765"])
def test_any_other_name_is_not(host: str) -> None:
    assert not is_our_host(host, 8765)


def test_a_token_comes_in_the_address_as_bearer_or_as_this_ports_cookie() -> None:
    token, port = "t" * 32, 8765
    assert has_token(token, port, token, {})
    assert has_token(token, port, None, {"authorization": f"Bearer {token}"})
    assert has_token(token, port, None, {"cookie": f"other=1; {cookie_name(port)}={token}"})
    # Of another server of this machine: a browser sends it here, too.
    assert has_token(token, port, None, {"cookie": f'odd={{"a": 1}}; {cookie_name(port)}={token}'})
    assert not has_token(token, port, "", {"cookie": f"{cookie_name(port)}={token}"})
    assert not has_token(token, port, None, {"cookie": f"{cookie_name(port + 1)}={token}"})
    assert not has_token(token, port, None, {})
    assert not has_token(token, port, "\udcff", {})
