"""What is taken in again from the quarantine: of each topic that is mended, whatever stays wrong beside it."""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer.buffer import Buffer
from gateway.buffer.quarantine import TOPIC_FORBIDDEN
from gateway.buffer.rows import Quarantined, Series
from gateway.config.config_file import route_table
from gateway.host.logs import FewLines
from gateway.intake.front_door import FrontDoor
from gateway.kafka.topics import TopicVerdict
from gateway.settings import GatewaySettings, KafkaSettings, Settings
from gateway.uplink import redrive
from gateway.uplink.memory import Memory
from gateway.uplink.redrive import TOO_LARGE_FOR_TOPIC, TOPIC_REFUSING, Redrive
from tests.support.buffers import BOOT, CLOCK, entry_of, input_of, opened, rows, store

GATEWAY, KAFKA = GatewaySettings("gw1"), KafkaSettings(("127.0.0.1:1",))
ADMIN: Any = None
T = TypeVar("T")


class Verdicts:
    """Every topic is unknown, but for those that somebody has mended."""

    def __init__(self) -> None:
        self.mended: set[str] = set()
        self.waiting: set[str] = set()
        self.makes = False
        """Whether the daemon makes topics."""
        self.asked: list[str] = []
        """Of the last look."""

    async def of_all(self, _: AIOKafkaAdminClient, topics: Collection[str], __: float = 0.0) -> dict[str, TopicVerdict]:
        self.asked = list(topics)
        return {topic: self._of(topic) for topic in topics}

    def is_made_when_wanted(self, verdict: TopicVerdict) -> bool:
        return self.makes and verdict.reason == "topic-unknown"

    def _of(self, topic: str) -> TopicVerdict:
        if topic in self.mended:
            return TopicVerdict(topic, batch_bytes_max=1_000)
        return TopicVerdict(topic, "topic-unknown", "make it", waits=topic in self.waiting)


class Topics:
    """The topics that are asked for, and for which device."""

    def __init__(self) -> None:
        self.asked_for: list[tuple[str, str]] = []

    def asked(self, verdict: TopicVerdict, device: str) -> TopicVerdict:
        self.asked_for.append((verdict.topic, device))
        return verdict


class Shelf:
    """A quarantine in memory, which counts what is read of it."""

    def __init__(self) -> None:
        self.id = "a"
        self.quarantine = self
        self.rows: dict[int, tuple[str | None, str]] = {}
        self.read = 0
        self._last = 0

    def put(self, *causes: tuple[str | None, str]) -> None:
        for cause in causes:
            self._last += 1
            self.rows[self._last] = cause

    def left(self, topic: str) -> list[int]:
        return [number for number, (of, _) in self.rows.items() if of == topic]

    async def run(self, function: Callable[["Shelf"], T]) -> T:
        return function(self)

    def of_topics(self, number: int, limit: int) -> list[tuple[int, str | None, str]]:
        found = [(each, *cause) for each, cause in self.rows.items() if each >= number][:limit]
        self.read += len(found)
        return found

    def find(self, numbers: Sequence[int]) -> dict[int, Quarantined]:
        return {
            number: input_of(self.rows[number][1], b"", f"device of {number}", "", 0)
            for number in numbers
            if number in self.rows
        }

    async def retry_quarantined(self, _buffer: object, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.rows[number]


class Scene:
    """Redrive, and all that it looks at."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.verdicts = Verdicts()
        self.topics = Topics()
        self.memory = SimpleNamespace(
            verdicts=self.verdicts,
            proven=set[str](),
            too_small=dict[str, int](),
            new_topics=self.topics,
            lines=FewLines(),
        )
        shelf: Any = self.shelf
        memory: Any = self.memory
        self.redrive = Redrive(shelf, shelf, memory)

    async def look(self) -> int:
        """Look once; how many rows were read for it."""
        self.shelf.read = 0
        await self.redrive.take_in_again(ADMIN)
        return self.shelf.read


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(redrive, "READ_MAX", 10)
    monkeypatch.setattr(redrive, "TAKEN_MAX", 20)
    monkeypatch.setattr(redrive, "AT_ONCE_MAX", 7)
    monkeypatch.setattr(redrive, "retry_quarantined", Shelf.retry_quarantined)
    return Scene()


async def test_a_topic_that_stays_wrong_is_in_nobodys_way(scene: Scene) -> None:
    scene.shelf.put(*[("wrong", "topic-unknown")] * 1_000, *[("mended", "topic-unknown")] * 5)
    scene.verdicts.mended = {"mended"}
    await scene.look()
    assert not scene.shelf.left("mended")
    assert len(scene.shelf.left("wrong")) == 1_000


async def test_what_stays_wrong_is_not_read_again(scene: Scene) -> None:
    scene.shelf.put(*[("wrong", "topic-unknown"), (None, "no-route")] * 500)
    assert await scene.look() >= 1_000
    assert await scene.look() <= 1
    scene.shelf.put(("wrong", "topic-compacted"))
    assert await scene.look() <= 4


async def test_a_topic_with_much_does_not_starve_one_with_little(scene: Scene) -> None:
    scene.shelf.put(*[("much", "topic-unknown")] * 100, *[("little", "topic-unknown")] * 20)
    scene.verdicts.mended = {"much", "little"}
    await scene.look()
    assert (len(scene.shelf.left("much")), len(scene.shelf.left("little"))) == (80, 0)
    assert min(scene.shelf.left("much")) == 21, "the oldest first"
    for _ in range(4):
        await scene.look()
    assert not scene.shelf.rows


async def test_a_long_quarantine_is_read_in_several_looks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive, "READS_MAX", 3)
    scene.shelf.put(*[("wrong", "topic-unknown"), ("thin", "topic-unknown"), *[(None, "no-route")] * 28] * 10)
    scene.shelf.put(("late", "topic-unknown"))
    scene.verdicts.mended = {"thin", "late"}
    for _ in range(30):
        assert await scene.look() <= 2 * 3 * 10 + 3
    assert not scene.shelf.left("thin")
    assert not scene.shelf.left("late")
    assert len(scene.shelf.left("wrong")) == 10


async def test_a_topic_is_made_for_what_waits_unless_it_was_beyond_a_bound(scene: Scene) -> None:
    """A device that was revoked since must not have its topics made for days."""
    scene.shelf.put(
        ("late", "topic-unknown"),
        ("junk", "topic-limit-of-device: kafka.topics_per_device_day_max"),
        ("junk2", "topic-limit: kafka.topics_created_max"),
        ("refused", "topic-not-created"),
        ("a_b", "topic-name-collides"),
    )
    await scene.look()
    assert not scene.topics.asked_for, "kafka.create_topics is off"
    scene.verdicts.makes = True
    await scene.look()
    assert scene.topics.asked_for == [("late", "device of 1"), ("refused", "device of 4"), ("a_b", "device of 5")]
    # Once somebody has made it, what waits for it goes.
    scene.verdicts.mended = {"junk", "junk2"}
    await scene.look()
    assert sorted(scene.shelf.rows) == [1, 4, 5]


async def test_thousands_of_topics_are_looked_at_in_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrive, "TOPICS_MAX", 7)
    scene.shelf.put(*[(f"t{number:02}", "topic-unknown") for number in range(20)])
    scene.verdicts.mended = {"t00", "t13", "t19"}
    for _ in range(3):
        await scene.look()
        assert len(scene.verdicts.asked) == 7
    assert not any(scene.shelf.left(topic) for topic in scene.verdicts.mended)
    for _ in range(3):
        await scene.look()
    assert len(scene.shelf.rows) == 17


async def test_a_topic_that_nothing_waits_for_any_more_is_left_alone(scene: Scene) -> None:
    """It might be made otherwise (`kafka.create_topics`), long after somebody threw its readings away."""
    scene.shelf.put(*[("typo", "topic-unknown"), ("wrong", "topic-unknown")] * 30)
    await scene.look()
    for number in scene.shelf.left("typo"):
        del scene.shelf.rows[number]
    del scene.shelf.rows[scene.shelf.left("wrong")[0]]
    await scene.look()
    await scene.look()
    assert scene.verdicts.asked == ["wrong"]


async def test_nothing_is_taken_for_a_topic_that_waits(scene: Scene) -> None:
    scene.shelf.put(("late", "topic-unknown"))
    scene.verdicts.waiting = {"late"}
    await scene.look()
    assert scene.shelf.left("late") == [1]
    scene.verdicts.mended = {"late"}
    await scene.look()
    assert not scene.shelf.rows


@pytest.mark.parametrize("reason", [TOPIC_FORBIDDEN, TOPIC_REFUSING])
async def test_where_only_writing_tells_one_goes_ahead(scene: Scene, reason: str) -> None:
    scene.shelf.put(*[("t", reason)] * 12)
    scene.verdicts.mended = {"t"}
    await scene.look()
    assert scene.shelf.left("t") == list(range(2, 13))
    scene.memory.proven.add("t")
    await scene.look()
    assert not scene.shelf.rows


async def test_what_is_too_large_goes_when_the_topic_takes_more(scene: Scene) -> None:
    scene.shelf.put(("t", TOO_LARGE_FOR_TOPIC), ("t", "topic-unknown"))
    scene.verdicts.mended = {"t"}
    scene.memory.too_small["t"] = 1_000
    await scene.look()
    assert scene.shelf.left("t") == [1]
    scene.memory.too_small["t"] = 999
    await scene.look()
    assert not scene.shelf.rows


async def test_another_file_is_read_from_its_beginning(scene: Scene) -> None:
    scene.shelf.put(*[(None, "no-route")] * 30, ("mended", "topic-unknown"))
    await scene.look()
    scene.shelf.id, scene.shelf.rows = "b", {1: ("mended", "topic-unknown"), 31: ("mended", "topic-unknown")}
    scene.verdicts.mended = {"mended"}
    await scene.look()
    assert not scene.shelf.rows


TOPICS = ("a", "b", "c")
CAUSES = st.sampled_from([(None, "no-route"), *((topic, f"topic-{why}") for topic in TOPICS for why in ("x", "y"))])
STEPS = st.tuples(st.lists(CAUSES, max_size=25), st.sets(st.sampled_from(TOPICS)), st.sets(st.integers(1, 60)))


@given(st.lists(STEPS, max_size=8))
async def test_of_each_mended_cause_the_oldest_go_and_nothing_else(
    steps: list[tuple[list[tuple[str | None, str]], set[str], set[int]]],
) -> None:
    """Whatever comes, whatever is mended or spoilt, and whatever somebody takes out meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redrive, "READ_MAX", 4)
        patch.setattr(redrive, "TAKEN_MAX", 5)
        patch.setattr(redrive, "AT_ONCE_MAX", 3)
        patch.setattr(redrive, "retry_quarantined", Shelf.retry_quarantined)
        scene = Scene()
        for put, mended, dropped in steps:
            scene.shelf.put(*put)
            for number in dropped & scene.shelf.rows.keys():
                del scene.shelf.rows[number]
            scene.verdicts.mended = mended
            expected = dict(scene.shelf.rows)
            for cause in set(expected.values()):
                if cause[0] in mended:
                    for number in [each for each, of in scene.shelf.rows.items() if of == cause][:5]:
                        del expected[number]
            await scene.look()
            assert scene.shelf.rows == expected


# -- in a file ------------------------------------------------------------------------------------


@asynccontextmanager
async def quarantining(path: Path, reasons: Sequence[tuple[str, str]]) -> AsyncIterator[tuple[Buffer, FrontDoor]]:
    """A buffer whose quarantine holds a reading for each topic and reason."""
    async with opened(path) as buffer:
        door = FrontDoor(buffer, route_table(Settings(GATEWAY, KAFKA)), GATEWAY, KAFKA, lambda: 1)
        series = [Series(topic, "42", "42", "device/42/x", "sluice.reading", "text/plain") for topic, _ in reasons]
        assert await store(buffer, [entry_of(each, b"%d" % n) for n, each in enumerate(series)])
        stored = await rows(buffer)
        aside = [
            input_of(
                reason, row.datum.payload, "42", "device/42/x", row.datum.received_us, series=row.series, boot_id=BOOT
            )
            for row, (_, reason) in zip(stored, reasons, strict=True)
        ]
        await buffer.quarantine(buffer.id, [door.quarantine.entry(each) for each in aside], stored)
        yield buffer, door


async def test_readings_of_a_mended_topic_are_in_the_buffer_again(tmp_path: Path) -> None:
    reasons = [("wrong", "topic-unknown"), ("mended", "topic-compacted"), ("mended", "record-too-large")]
    async with quarantining(tmp_path / "buffer.db", reasons) as (buffer, door):
        memory = Memory(KAFKA, lambda: CLOCK)
        verdicts: Any = Verdicts()
        verdicts.mended, memory.verdicts = {"mended"}, verdicts
        before = len(await rows(buffer))
        await Redrive(buffer, door, memory).take_in_again(ADMIN)
        assert [row.datum.payload for row in (await rows(buffer))[before:]] == [b"1"]
        assert [number for number, _, _ in await buffer.run(lambda file: file.quarantine.of_topics(0, 10))] == [1, 3]


async def test_a_topic_is_named_where_it_is_the_cause(tmp_path: Path) -> None:
    reasons = [("a", "topic-unknown"), ("a", "record-too-large"), ("b", TOPIC_FORBIDDEN), ("b", "topic-compacted")]
    async with quarantining(tmp_path / "buffer.db", reasons) as (buffer, _):
        causes = [(1, "a", "topic-unknown"), (2, None, "record-too-large"), (3, "b", TOPIC_FORBIDDEN)]
        assert await buffer.run(lambda file: file.quarantine.of_topics(0, 3)) == causes, (
            "so many are read, whatever their cause"
        )
        assert await buffer.run(lambda file: file.quarantine.of_topics(2, 1)) == causes[1:2]
        assert await buffer.run(lambda file: file.quarantine.of_topics(4, 9)) == [(4, "b", "topic-compacted")]
        assert await buffer.run(lambda file: file.quarantine.of_topics(5, 9)) == []
