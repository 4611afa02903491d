"""A retransmission is stored once; a false match would lose a reading, so anything doubtful is stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.duplicate_window import WINDOW_SEQUENCES, DuplicateWindow, Verdict


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
    window.admit(0, b"a")
    window.admit(WINDOW_SEQUENCES, b"b")
    assert window.admit(0, b"a") is Verdict.BELOW


@given(st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=2)), max_size=200))
def test_never_a_duplicate_that_was_not_admitted_before(readings: list[tuple[int, bytes]]) -> None:
    window = DuplicateWindow()
    admitted: set[tuple[int, bytes]] = set()
    for sequence, payload in readings:
        verdict = window.admit(sequence, payload)
        if verdict is Verdict.DUPLICATE:
            assert (sequence, payload) in admitted
        admitted.add((sequence, payload))


@given(st.lists(st.integers(0, 2**63 - 1), max_size=100), st.integers(0, 2**63 - 1))
def test_a_window_that_was_stored_judges_as_before(sequences: list[int], probe: int) -> None:
    window = DuplicateWindow()
    for sequence in sequences:
        window.admit(sequence, b"x")
    restored = DuplicateWindow.from_bytes(window.to_bytes())
    assert restored.admit(probe, b"x") is window.admit(probe, b"x")


def test_a_stored_window_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        DuplicateWindow.from_bytes(bytes(12))
