"""What the disk was spared today: exact across restarts and midnights, or said to be about so much."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gateway.uplink.spared import DAY_US, SparedToday

HOUR_US = DAY_US // 24
NOON_US = 20_000 * DAY_US + DAY_US // 2


def noon() -> SparedToday:
    """A count that has seen 40 rows at noon."""
    spared = SparedToday(b"", was_cut_off=False)
    spared.count(40, 0, NOON_US)
    return spared


def told(spared: SparedToday) -> tuple[int | None, bool]:
    return spared.rows, spared.is_about


def test_a_count_ends_at_midnight() -> None:
    spared = noon()
    spared.count(50, HOUR_US, NOON_US + HOUR_US)
    assert told(spared) == (50, False)
    spared.count(53, 13 * HOUR_US, NOON_US + 13 * HOUR_US)
    assert told(spared) == (3, False)


def test_a_restart_goes_on_and_a_crash_makes_it_about_so_much_until_midnight() -> None:
    again = SparedToday(noon().state(), was_cut_off=False)
    assert told(again) == (None, False), "the date is not known yet"
    again.count(2, 0, NOON_US + HOUR_US)
    assert told(again) == (42, False)
    crashed = SparedToday(again.state(), was_cut_off=True)
    crashed.count(0, 0, NOON_US + 2 * HOUR_US)
    assert told(crashed) == (42, True)
    after = SparedToday(crashed.state(), was_cut_off=False)
    after.count(0, 0, NOON_US + 3 * HOUR_US)
    assert told(after) == (42, True)
    after.count(1, 0, NOON_US + DAY_US)
    assert told(after) == (1, False)


def test_rows_before_the_date_is_known_count_for_it() -> None:
    spared = SparedToday(b"", was_cut_off=False)
    spared.count(5, HOUR_US, None)
    spared.count(7, 2 * HOUR_US, NOON_US)
    assert told(spared) == (7, False)
    over_midnight = SparedToday(b"", was_cut_off=False)
    over_midnight.count(5, HOUR_US, None)
    over_midnight.count(7, 14 * HOUR_US, NOON_US)
    assert told(over_midnight) == (7, True)
    ended_before = SparedToday(b"", was_cut_off=False)
    ended_before.count(5, HOUR_US, None)
    again = SparedToday(ended_before.state(), was_cut_off=False)
    again.count(1, 0, NOON_US)
    assert told(again) == (1, True)


def test_a_date_that_steps_back_begins_a_count_that_is_about_so_much() -> None:
    spared = noon()
    spared.count(41, HOUR_US, NOON_US - DAY_US)
    assert told(spared) == (1, True)


@given(st.binary() | st.sampled_from([b"", b"{}", b'{"day":1e9}', b'{"rows":-1}', b'{"day":"x"}']))
def test_damaged_bytes_begin_anew(state: bytes) -> None:
    spared = SparedToday(state, was_cut_off=False)
    spared.count(3, 0, NOON_US)
    assert told(spared) == (3, False)


@dataclass
class Model:
    """A gateway that is stopped and killed: all rows with their true times, and the states that a disk may have."""

    spared: SparedToday = field(default_factory=lambda: SparedToday(b"", was_cut_off=False))
    rows: list[tuple[int, int]] = field(default_factory=list)
    total: int = 0
    at_us: int = 0
    is_dated: bool = False
    saved: list[bytes] = field(default_factory=lambda: [b""])

    @property
    def wall_us(self) -> int:
        return NOON_US + self.at_us

    def count(self, added: int) -> None:
        self.rows.append((self.wall_us, added))
        self.total += added
        self.spared.count(self.total, self.at_us, self.wall_us if self.is_dated else None)

    def begin(self, state: bytes, *, was_cut_off: bool) -> None:
        self.spared, self.total, self.is_dated = SparedToday(state, was_cut_off=was_cut_off), 0, False
        self.saved = [state]

    def check(self) -> None:
        found = self.spared.rows
        assert (found is None) == (not self.is_dated)
        if found is not None and not self.spared.is_about:
            today = self.wall_us // DAY_US
            assert found == sum(added for wall_us, added in self.rows if wall_us // DAY_US == today)


@given(st.data())
def test_a_count_is_exact_unless_it_says_about(data: st.DataObject) -> None:
    model = Model()
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["rows", "rows", "wait", "learn", "save", "stop", "kill"])):
            case "rows":
                model.count(data.draw(st.integers(1, 100)))
            case "wait":
                model.at_us += data.draw(st.integers(0, 30 * HOUR_US))
            case "learn":
                model.is_dated = True
            case "save":
                model.saved.append(model.spared.state())
            case "stop":
                model.begin(model.spared.state(), was_cut_off=False)
            case "kill":
                model.begin(model.saved[-1], was_cut_off=True)
        model.count(0)
        model.check()
