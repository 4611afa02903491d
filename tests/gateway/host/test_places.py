"""Places, where the longest waiting goes first; a rate with a burst; one host's address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.host.places import Bucket, Places, source_of


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::1", "::/64"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("no:address", "no:address"),
        ("", ""),
    ],
)
def test_one_host_is_one_source(host: str, source: str) -> None:
    assert source_of(host) == source


@given(
    most=st.integers(1, 20),
    per_s=st.floats(0.1, 100),
    pauses_s=st.lists(st.floats(0, 3), min_size=1, max_size=100),
)
def test_a_bucket_gives_its_burst_and_its_rate_and_no_more(most: int, per_s: float, pauses_s: list[float]) -> None:
    bucket, now_s, taken = Bucket(most, per_s), 1_000.0, []
    for pause_s in pauses_s:
        now_s += pause_s
        wait_s = bucket.wait_s(now_s)
        assert bucket.take(now_s) == (wait_s == 0)
        if not wait_s:
            taken.append(now_s)
    for first, begun_s in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= most + (taken[last] - begun_s) * per_s + 1e-6


def test_a_bucket_says_when_there_is_a_token_again() -> None:
    bucket = Bucket(2, 4)
    assert [bucket.take(1.0) for _ in range(3)] == [True, True, False]
    assert bucket.wait_s(1.0) == 0.25
    assert bucket.take(1.25)
    assert not bucket.take(1.25)


class Hosts(RuleBasedStateMachine):
    """Places against a list of who waits, in their order, and a set of who is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places[int](4)
        self.waiting: list[int] = []
        self.kept: set[int] = set()
        self.count = 0

    @rule()
    def come(self) -> None:
        if self.places.are_taken:
            oldest = self.places.longest_waiting()
            if oldest is None:
                return
            self.leave(oldest)
        self.count += 1
        self.places.enter(self.count)
        self.waiting.append(self.count)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        holder = data.draw(st.integers(1, self.count))
        self.places.keep(holder)
        if holder in self.waiting:
            self.waiting.remove(holder)
            self.kept.add(holder)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        holder = data.draw(st.integers(1, self.count))
        self.places.wait(holder)
        if holder in self.kept:
            self.kept.remove(holder)
            self.waiting.append(holder)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.integers(1, self.count)))

    def leave(self, holder: int) -> None:
        self.places.leave(holder)
        self.waiting = [each for each in self.waiting if each != holder]
        self.kept.discard(holder)

    @invariant()
    def holds(self) -> None:
        assert list(self.places) == [*self.waiting, *self.places._kept]
        assert self.places._kept == self.kept
        assert len(self.places) == len(self.waiting) + len(self.kept) <= 4
        assert self.places.longest_waiting() == (self.waiting[0] if self.waiting else None)
        assert self.places.are_taken == (len(self.places) == 4)


test_places_keep_their_order = Hosts.TestCase
