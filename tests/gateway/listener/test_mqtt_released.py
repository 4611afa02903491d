"""The last released exchanges are remembered for the next connection, in few bytes."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.listener.released import RELEASED_MAX, RELEASED_US, Released
from gateway.listener.session import digest

A, B = digest("t", b"a"), digest("t", b"b")


def test_a_released_delivery_comes_again_once_on_a_later_connection() -> None:
    released = Released()
    released.add(7, A, 0)
    assert not released.comes_again(7, A), "on the same connection it is a new message"
    released.resume()
    assert not released.comes_again(8, A)
    assert released.comes_again(7, A)
    assert not released.comes_again(7, A), "the identifier is in use again"
    released.resume()
    released.resume()
    assert released.comes_again(7, A), "that message was not released since: a connection in between was cut"


def test_another_message_under_the_identifier_ends_what_it_stood_for() -> None:
    released = Released()
    released.add(7, A, 0)
    released.resume()
    assert not released.comes_again(7, B)
    assert not released.comes_again(7, A)


def test_a_restart_knows_what_was_kept() -> None:
    before = Released()
    before.add(7, A, 0)
    after = Released(before.packed)
    after.resume()
    assert after.comes_again(7, A)


def test_few_are_kept_of_a_sensor_that_sends_now_and_then() -> None:
    """Its mark is written with each reading: the card pays for it."""
    released = Released()
    one = 0
    for second in range(1_000):
        released.add(second + 1, A, second * 1_000_000)
        one = one or len(released.packed)
        assert len(released.packed) <= 2 * RELEASED_US // 1_000_000 * one
    released.add(5_000, A, 10**12)
    assert len(released.packed) == one


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from([A, B])), max_size=200), st.integers(0, 300))
def test_the_last_are_remembered_by_identifier(exchanges: list[tuple[int, bytes]], restart_after: int) -> None:
    released = Released()
    model: dict[int, bytes] = {}
    for number, (packet_id, message) in enumerate(exchanges):
        if number == restart_after:
            released = Released(released.packed)
        released.add(packet_id, message, number)
        model.pop(packet_id, None)
        model[packet_id] = message
    released.resume()
    expected = dict(list(model.items())[-RELEASED_MAX:])
    asked = [(packet_id, message) for packet_id in range(301) for message in (A, B)]
    assert {each for each in asked if knows(released, *each)} == set(expected.items())


def knows(released: Released, packet_id: int, message: bytes) -> bool:
    """Ask without an effect on the next question."""
    asked = Released(released.packed)
    asked.resume()
    return asked.comes_again(packet_id, message)
