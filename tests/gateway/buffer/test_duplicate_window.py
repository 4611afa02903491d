"""A retransmission is stored once; a false match would lose a reading, so anything doubtful is stored."""

import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer.duplicate_window import DuplicateWindow, Verdict
from gateway.reading import WINDOW_SEQUENCES


def test_a_retransmission_is_told_from_a_new_reading() -> None:
    window = DuplicateWindow()
    assert window.admit(0, b"21.5") is Verdict.NEW
    assert window.admit(0, b"21.5") is Verdict.DUPLICATE
    assert window.admit(1, b"21.5") is Verdict.NEW


def test_the_same_sequence_with_another_payload_is_a_conflict_and_not_a_duplicate() -> None:
    window = DuplicateWindow()
    window.admit(7, b"21.5")
    assert window.admit(7, b"99.9") is Verdict.CONFLICT
    assert window.admit(7, b"99.9") is Verdict.DUPLICATE


def test_what_is_older_than_the_window_is_not_called_a_duplicate() -> None:
    window = DuplicateWindow()
    for sequence in range(WINDOW_SEQUENCES):
        window.admit(sequence, b"a")
    assert window.admit(0, b"a") is Verdict.DUPLICATE
    window.admit(WINDOW_SEQUENCES, b"b")
    assert window.admit(0, b"a") is Verdict.BELOW


def test_numbers_of_readings_that_a_full_sensor_dropped_take_no_room() -> None:
    window = DuplicateWindow()
    for held in range(160, 225):
        window.admit(held, b"a")
    # It dropped 225 to 283, and knows nothing yet of what became of the others.
    window.admit(284, b"b")
    assert window.admit(220, b"a") is Verdict.DUPLICATE


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([b"a", b"b"])), max_size=300))
def test_the_highest_that_came_are_known_in_any_order(readings: list[tuple[int, bytes]]) -> None:
    window = DuplicateWindow()
    known: dict[int, bytes] = {}
    for sequence, payload in readings:
        if sequence in known:
            expected = Verdict.DUPLICATE if known[sequence] == payload else Verdict.CONFLICT
        elif len(known) == WINDOW_SEQUENCES and sequence < min(known):
            expected = Verdict.BELOW
        else:
            expected = Verdict.NEW
        assert window.admit(sequence, payload) is expected
        if expected is not Verdict.BELOW:
            known[sequence] = payload
            known = dict(sorted(known.items())[-WINDOW_SEQUENCES:])
        assert window.sequences() == set(known)


@given(st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=2)), max_size=200))
def test_never_a_duplicate_that_was_not_admitted_before(readings: list[tuple[int, bytes]]) -> None:
    window = DuplicateWindow()
    admitted: set[tuple[int, bytes]] = set()
    for sequence, payload in readings:
        verdict = window.admit(sequence, payload)
        if verdict is Verdict.DUPLICATE:
            assert (sequence, payload) in admitted
        admitted.add((sequence, payload))


@given(
    st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 100) | st.integers(5_000, 100_000), max_size=100),
    st.integers(0, 2**63 - 1),
    st.sets(st.integers(0, 100)),
)
def test_a_window_that_was_stored_judges_as_before(sequences: list[int], probe: int, but: set[int]) -> None:
    window = DuplicateWindow()
    for sequence in sequences:
        window.admit(sequence, b"x")
    restored = DuplicateWindow.from_bytes(window.to_bytes())
    assert restored.to_bytes() == window.to_bytes()
    assert DuplicateWindow.from_bytes(window.to_bytes(but)).sequences() == window.sequences() - but
    for sequence in (*sequences, probe):
        assert restored.admit(sequence, b"x") is window.admit(sequence, b"x")


def test_a_window_of_readings_in_order_takes_four_bytes_for_each() -> None:
    """A card gets the windows of all sensors again and again."""
    window = DuplicateWindow()
    for sequence in range(10**6, 10**6 + 1_000):
        window.admit(sequence, b"x")
    assert len(window.to_bytes()) <= 4 * WINDOW_SEQUENCES + 9


@given(st.binary(max_size=900) | st.tuples(st.sampled_from([b"1", b"B", b"Q"]), st.binary(max_size=60)).map(b"".join))
def test_damaged_bytes_are_a_window_or_refused(stored: bytes) -> None:
    try:
        window = DuplicateWindow.from_bytes(stored)
    except ValueError:
        return
    assert len(window.sequences()) <= WINDOW_SEQUENCES
    assert window.admit(2**63 - 1, b"x") in Verdict


@given(st.sets(st.integers(0, 300), max_size=WINDOW_SEQUENCES))
def test_a_window_that_an_earlier_program_stored_by_slots_is_read(sequences: set[int]) -> None:
    slots = array("q", [-1]) * WINDOW_SEQUENCES
    digests = array("I", [0]) * WINDOW_SEQUENCES
    for sequence in sorted(sequences):
        slots[sequence % WINDOW_SEQUENCES] = sequence
        digests[sequence % WINDOW_SEQUENCES] = zlib.crc32(b"%d" % sequence)
    window = DuplicateWindow.from_bytes(slots.tobytes() + digests.tobytes())
    assert window.sequences() == {sequence for sequence in slots if sequence >= 0}
    for sequence in window.sequences():
        assert window.admit(sequence, b"%d" % sequence) is Verdict.DUPLICATE


def test_a_stored_window_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        DuplicateWindow.from_bytes(bytes(12))
