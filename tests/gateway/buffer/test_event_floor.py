"""No watermark may pass a reading that still waits."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer.lanes import NOTHING_US, EventFloor


@given(st.lists(st.one_of(st.integers(0, 100), st.floats(0, 1))))
def test_the_floor_is_never_above_what_waits(steps: list[int | float]) -> None:
    floor = EventFloor()
    waiting: list[int] = []
    next_sequence = 0
    for step in steps:
        if isinstance(step, int):
            floor.add(step)
            waiting.append(step)
            next_sequence += 1
        elif waiting:
            gone = int(len(waiting) * step)
            del waiting[:gone]
            floor.settle(next_sequence - len(waiting) - 1, next_sequence)
        assert floor.value_us <= min(waiting, default=NOTHING_US)
    floor.settle(next_sequence - 1, next_sequence)
    assert floor.value_us == NOTHING_US


def test_the_floor_rises_under_a_steady_flow_that_never_runs_dry() -> None:
    floor = EventFloor()
    for sequence in range(1_000):
        floor.add(sequence)
        floor.settle(sequence - 5, sequence + 1)
    assert floor.value_us > 980
