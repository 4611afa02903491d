"""Keeps what the uplink knows across sessions: its state, acknowledged offsets, the rate of the link."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import structlog

from gateway.buffer.file import OFFSETS_BEHIND
from gateway.buffer.rows import Row
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.host.logs import FewLines
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.link import KafkaLink
from gateway.kafka.session import BATCH_BYTES_MAX, TopicVerdicts
from gateway.kafka.topics import TopicVerdict
from gateway.reading import Mark
from gateway.settings import KafkaSettings
from gateway.uplink.echoes import EchoedRows, LastReadings
from gateway.uplink.link_rate import LinkRate, Passage
from gateway.uplink.new_topics import NewTopics
from gateway.uplink.quota import DAY_S, UplinkBudget
from gateway.uplink.spared import SparedToday
from gateway.uplink.state import UplinkState

REQUEST_BYTES_MAX = 8 * BATCH_BYTES_MAX
"""Bytes that a round may put on the wire, however wide the link."""
LIVE_S = 1.0
"""Seconds that a round may take on the link while live readings share it with a backlog."""
RATIO_FIRST = 3.0
"""Compression of records that is assumed until it was measured."""
PAUSE_S_MAX = 1.0
UPLINK_MARKS = "uplink/"
OFFSET_MARKS = UPLINK_MARKS + "offset/"
"""Prefix of the keys of offset marks, followed by topic, `/` and partition. A mark has the offset after the last record
that was acknowledged."""
CLUSTER_MARK = UPLINK_MARKS + "cluster"
"""Key of the mark that names the cluster of these offsets."""
BUDGET_MARK = UPLINK_MARKS + "budget"
SPARED_MARK = UPLINK_MARKS + "spared"
"""Key of the mark that counts today's rows that the disk was spared. It comes with the offsets of these rows, so it
costs no commit of its own."""
BUDGET_SAVE_S = 30.0
"""Seconds between two writes of a metered link's use to disk, at least."""
THROTTLED_S = 60.0
"""Seconds for which it is still reported that a broker held this gateway back."""

PROBE_ROWS = 50
"""Rows of a batch for a partition in trouble, until the partition answers."""
TROUBLE_S_MIN = 5.0
TROUBLE_S_MAX = 300.0
"""Shortest and longest pause in seconds for a partition in trouble. Each pause is twice as long as the one before."""
OFFSETS_MAX = 20_000
"""Partitions whose offsets are kept, and told in heartbeats."""

Partition = tuple[str, int]
"""Topic and number of the partition."""
NO_PARTITION = -1
"""Stands for the number while a topic waits: it does not exist yet, or cannot be judged just now."""

log = structlog.get_logger()


class QuotaUsedUpError(Exception):
    """`kafka.bytes_per_day_max` is used up: nothing may be sent for now."""


@dataclass(slots=True)
class _Suspect:
    """A partition that has refused a batch."""

    rows_max: int
    left: int
    """Rows of that batch that were not taken since."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A partition that did not answer, or answered with an error."""

    pause_s: float
    until_s: float


class Memory:
    """Knowledge of the uplink that outlives a session. It belongs to the event loop."""

    def __init__(self, kafka: KafkaSettings, clock: Callable[[], BootClock]) -> None:
        self._kafka = kafka
        self._clock = clock
        self.state = UplinkState()
        self.lines = FewLines()
        """Log lines about topics. Only a few are written, because sensors decide how many topics there are."""
        self.verdicts = TopicVerdicts(kafka, self.lines)
        self.new_topics = NewTopics(kafka, self.verdicts, self.lines, self._today)
        self.rate = LinkRate(kafka.request_timeout_s, REQUEST_BYTES_MAX)
        self.cluster_id = ""
        self.offsets: dict[tuple[str, int], int] = {}
        """By topic and partition: the offset after the last record that was acknowledged to this gateway."""
        self.is_behind = False
        """Whether Kafka may have acknowledged more than `offsets` say, as a former start ended without a close."""
        self.too_small: dict[str, int] = {}
        """By topic that could not take a record: bytes of the largest batch that it took then."""
        self.proven: set[str] = set()
        """Topics that have taken a record since they last refused one."""
        self.refused: dict[tuple[str, int, int], str] = {}
        """By file, lane and sequence: why a broker refused a row that the disk did not take."""
        self.quick: set[str] = set()
        """Topics for which a broker answered in good time when it was last asked."""
        self.echoed = EchoedRows()
        self.last_readings = LastReadings()
        self._ratio = 1.0 if kafka.compression == "none" else RATIO_FIRST
        self._suspects: dict[Partition, _Suspect] = {}
        self._troubles: dict[Partition, _Trouble] = {}
        self._lone_refusals: Counter[str] = Counter()
        self._unanswered: dict[Partition, dict[tuple[int, int], int]] = {}
        """By lane and series: the highest sequence that a partition was sent and did not acknowledge. The partition may
        have rows up to it. Only rows of one series keep their order in a partition."""
        self._unsaved: dict[str, Mark] = {}
        self._spared: SparedToday | None = None
        self._spared_kept = b""
        self._budget: UplinkBudget | None = None
        self._budget_due_s = 0.0
        self._spent_of: KafkaLink | None = None
        self._spent_bytes = 0
        self._throttled_s = 0.0
        self._throttled_at_s = float("-inf")

    def recall(self, marks: Mapping[str, bytes]) -> None:
        """Go on from the marks that the buffer has kept under `UPLINK_MARKS`."""
        self.cluster_id = marks.get(CLUSTER_MARK, b"").decode(errors="replace")
        self.offsets = _offsets(marks)
        self.is_behind = OFFSETS_BEHIND.key in marks
        self._spared_kept = marks.get(SPARED_MARK, b"")
        self._spared = SparedToday(self._spared_kept, was_cut_off=self.is_behind)
        self.new_topics.allowance.recall(marks)
        if self._kafka.is_metered:
            self._budget = UplinkBudget(
                self._kafka.bytes_per_s_max, self._kafka.bytes_per_day_max, marks.get(BUDGET_MARK)
            )

    # -- the link -------------------------------------------------------------------------------

    def round_bytes(self, shared: bool) -> float:  # noqa: FBT001 - the contract of Supply.next
        """Bytes that a round may take before compression. `shared` means that live readings come beside a backlog."""
        wire = self.rate.bytes_in(LIVE_S) if shared else self.rate.request_bytes_max
        if self._budget is not None:
            allowance = self._budget.allowance(*self._now())
            wire = wire if allowance is None else min(wire, allowance)
        return wire * self._ratio

    def learn(
        self, batches: Iterable[EncodedBatch], passage: Passage | None, echoes: Iterable[EncodedBatch] = ()
    ) -> None:
        """Learn from acknowledged batches, and how they came through. If `passage` is None, they were given up.

        Rounds are measured by rows, so the bytes of `echoes` count as part of what their rows' own batches cost.
        """
        sent = [batch for batch in batches if batch.wire_bytes is not None]
        raw_bytes = sum(batch.bytes for batch in sent)
        wire_bytes = sum(batch.wire_bytes or 0 for each in (sent, echoes) for batch in each)
        if raw_bytes and wire_bytes:
            ratio = raw_bytes / wire_bytes
            # If data compress worse than assumed, rounds become too large. So that is believed at once.
            self._ratio = min(ratio, self._ratio + (ratio - self._ratio) / 4)
        if passage is None:
            # A round that came out larger than allowed counts as one of the allowed size, so that the next is smaller.
            self.rate.timed_out(min(wire_bytes or self.rate.request_bytes_max, self.rate.request_bytes_max))
        else:
            self.rate.acknowledged(wire_bytes, passage.sending_s, passage.answered_s)
        self.state.bytes_per_s = int(self.rate.bytes_per_s)

    async def wait_for_allowance(self, link: KafkaLink) -> None:
        """Wait until something may be sent. Raises QuotaUsedUpError if nothing may be sent today."""
        self.count(link)
        while self._budget is not None:
            if self._budget.is_used_up(*self._now()):
                raise QuotaUsedUpError
            wait_s = self._budget.wait_s(*self._now())
            if not wait_s:
                return
            await asyncio.sleep(min(wait_s, PAUSE_S_MAX))

    def may_send(self) -> bool:
        """Whether something may be sent at this moment."""
        return self._budget is None or not self._budget.wait_s(*self._now())

    async def wait_for_tomorrow(self) -> None:
        """Wait until the quota begins anew."""
        while self._budget is not None and self._budget.is_used_up(*self._now()):
            self.state.quota_used_up = True
            self.state.quota_until = self._budget.used_up_until(*self._now())
            await asyncio.sleep(PAUSE_S_MAX)
        self.state.quota_used_up, self.state.quota_until = False, None

    def count(self, link: KafkaLink) -> None:
        """Count the bytes that a session's connections have carried since the last call."""
        if link is not self._spent_of:
            self._spent_of, self._spent_bytes = link, 0
        total = link.wire_bytes()
        spent, self._spent_bytes = total - self._spent_bytes, total
        self.state.wire_bytes += spent
        self._note_throttle(link)
        if self._budget is not None:
            self._budget.spend(spent, *self._now())

    def _note_throttle(self, link: KafkaLink) -> None:
        """Note that a broker holds this gateway back, and log it once."""
        if link.throttled_at_s > self._throttled_at_s:
            if not self.throttled_s:
                log.warning(
                    "a quota of Kafka's holds this gateway back: what waits goes more slowly, and nothing is lost",
                    throttle_s=link.throttled_s,
                    hint="have producer_byte_rate raised for this gateway's client id, its id, or for its user",
                )
            self._throttled_s, self._throttled_at_s = link.throttled_s, link.throttled_at_s

    @property
    def throttled_s(self) -> float:
        """See `UplinkState.throttled_s`."""
        is_recent = time.monotonic() < self._throttled_at_s + self._throttled_s + THROTTLED_S
        return self._throttled_s if is_recent else 0.0

    def _now(self) -> tuple[float, float | None]:
        now_us, clock = boottime_us(), self._clock()
        return now_us / 1e6, clock.at(now_us) / 1e6 if clock.synced else None

    def _today(self) -> int | None:
        wall_s = self._now()[1]
        return None if wall_s is None else int(wall_s // DAY_S)

    # -- partitions and topics ------------------------------------------------------------------

    def acknowledged(self, partition: Partition, offset: int, records: int) -> None:
        """Note that a partition has taken a batch at `offset`; -1 if the broker had it already and names no offset."""
        topic = partition[0]
        if offset >= 0 and (partition in self.offsets or len(self.offsets) < OFFSETS_MAX):
            self.offsets[partition] = offset + records
            key = OFFSET_MARKS + _spelled(partition)
            self._unsaved[key] = Mark(key, b"%d" % (offset + records))
        self.proven.add(topic)
        self.took(partition, records)

    def took(self, partition: Partition, records: int) -> None:
        """Note that a partition has taken a batch. Of echoes, that is all: heartbeats name no offset of theirs."""
        topic, number = partition
        self.verdicts.acquit(topic)
        self._lone_refusals.pop(topic, None)
        self._troubles.pop(partition, None)
        suspect = self._suspects.get(partition)
        if suspect is not None:
            suspect.left -= records
            if suspect.left <= 0:
                del self._suspects[partition]
        self._troubles.pop((topic, NO_PARTITION), None)
        self.state.parked.pop(topic, None)
        if self.state.parked.pop(_spelled(partition), None) is not None:
            self.lines.tell(log.info, "a partition takes records again", topic=topic, partition=number)

    def sent_without_answer(self, partition: Partition, rows: Iterable[Row]) -> None:
        """Note that a partition may have these rows: the connection ended before it answered."""
        series = self._unanswered.setdefault(partition, {})
        for row in rows:
            of = row.lane, row.series
            series[of] = max(row.sequence, series.get(of, row.sequence))

    def answered(self, partition: Partition, rows: Iterable[Row]) -> None:
        """Note that a partition has these rows, and so all earlier rows of their series."""
        series = self._unanswered.get(partition)
        if series is not None:
            for row in rows:
                of = row.lane, row.series
                if row.sequence >= series.get(of, row.sequence + 1):
                    del series[of]
            if not series:
                del self._unanswered[partition]

    def may_have(self, topics: Collection[str], row: Row) -> bool:
        """Whether one of these topics may have a row without an acknowledgement."""
        return any(
            topic in topics and row.sequence <= series.get((row.lane, row.series), -1)
            for (topic, _), series in self._unanswered.items()
        )

    def rows_max(self, partition: Partition) -> int:
        """Number of rows that a batch for a partition may have."""
        rows_max = PROBE_ROWS if partition in self._troubles else self._kafka.batch_rows_max
        suspect = self._suspects.get(partition)
        return rows_max if suspect is None else min(rows_max, suspect.rows_max)

    def is_suspect(self, partition: Partition) -> bool:
        """Whether a partition refused a batch, and has not taken all of its rows since."""
        return partition in self._suspects

    def suspect(self, partition: Partition, rows: int) -> None:
        """Note a refused batch of `rows` rows. Half go at a time, until all are taken or the record is found."""
        self._suspects[partition] = _Suspect(max(1, rows // 2), rows)
        self.proven.discard(partition[0])

    def condemn(self, verdict: TopicVerdict) -> None:
        """Leave a topic alone for a while, as a broker takes nothing for it."""
        self.verdicts.condemn(verdict)
        self.proven.discard(verdict.topic)

    def count_lone_refusal(self, partition: Partition) -> int:
        """Count a record that was refused alone. Returns how many of its topic were refused one after the other."""
        topic = partition[0]
        self._suspects.pop(partition, None)
        self._lone_refusals[topic] += 1
        self.proven.discard(topic)
        return self._lone_refusals[topic]

    def trouble(self, partition: Partition, *, pauses: bool) -> None:
        """Note that a partition did not answer, or had an error that is no refusal. It gets small batches from now on.

        If `pauses` is true, it is left alone for a while first.
        """
        before = self._troubles.get(partition)
        pause_s = min(TROUBLE_S_MIN if before is None else 2 * before.pause_s, TROUBLE_S_MAX)
        self._troubles[partition] = _Trouble(pause_s, time.monotonic() + (pause_s if pauses else 0.0))

    def is_troubled(self, partition: Partition) -> bool:
        """Whether a partition has not answered since it was last in trouble."""
        return partition in self._troubles

    def rests_until_s(self, partition: Partition) -> float:
        """When a partition may be tried (monotonic); 0 if it may always be tried."""
        trouble = self._troubles.get(partition)
        return 0.0 if trouble is None else trouble.until_s

    def why_parked(self, partition: Partition) -> str:
        """The reason that was given for a partition that rests."""
        return self.state.parked.get(_spelled(partition), "does not answer")

    def tell_parked(self, partition: Partition, why: str) -> None:
        """Keep why a partition takes nothing, and log it once."""
        if _spelled(partition) not in self.state.parked:
            topic, number = partition
            self.lines.tell(
                log.warning,
                "a partition takes nothing: its readings wait, others go on",
                topic=topic,
                partition=None if number == NO_PARTITION else number,
                why=why,
            )
        self.state.parked[_spelled(partition)] = why

    def nothing_waits(self) -> None:
        """Forget why partitions were parked, as no reading waits. It went to another topic, or became too old."""
        self.state.parked.clear()
        self.echoed.nothing_waits()

    # -- what outlives a restart ----------------------------------------------------------------

    def enter(self, cluster_id: str) -> list[Mark]:
        """Go on with a cluster, and return the marks to keep. Offsets of another cluster are forgotten."""
        if cluster_id == self.cluster_id:
            return []
        forgotten = [Mark(OFFSET_MARKS + _spelled(partition), None) for partition in self.offsets]
        self.cluster_id = cluster_id
        self.offsets.clear()
        self._unsaved.clear()
        self.state.parked.clear()
        self._troubles.clear()
        self._unanswered.clear()
        self.quick.clear()
        self.is_behind = False
        return [*forgotten, Mark(CLUSTER_MARK, cluster_id.encode()), Mark(OFFSETS_BEHIND.key, None)]

    def expect(self, topic: str, partitions: Iterable[int]) -> list[Mark] | None:
        """The marks to keep before a topic may have records that no mark tells of; None if there are too many."""
        new = [(topic, number) for number in partitions if (topic, number) not in self.offsets]
        if len(self.offsets) + len(new) > OFFSETS_MAX:
            return None
        return [Mark(OFFSET_MARKS + _spelled(partition), b"0") for partition in new]

    def expected(self, marks: Iterable[Mark]) -> None:
        """Note that such marks are on disk."""
        self.offsets |= _offsets({mark.key: mark.value or b"" for mark in marks})

    def caught_up(self, ends: Mapping[Partition, int]) -> list[Mark]:
        """Note where Kafka's partitions end, after a start that had lost sight of it. Returns the marks to keep."""
        for partition, end in ends.items():
            if end > self.offsets.get(partition, 0):
                self.offsets[partition] = end
        self.is_behind = False
        marks = [Mark(OFFSET_MARKS + _spelled(partition), b"%d" % self.offsets[partition]) for partition in ends]
        return [*marks, Mark(OFFSETS_BEHIND.key, None)]

    def take_marks(self) -> list[Mark]:
        """The marks to keep, of what was acknowledged since the last call."""
        marks, self._unsaved = list(self._unsaved.values()), {}
        return marks

    def count_spared(self, total: int) -> None:
        """Take in how many rows the disk was spared since the start."""
        if self._spared is not None:
            now_us, clock = boottime_us(), self._clock()
            self._spared.count(total, now_us, clock.at(now_us) if clock.synced else None)
            self.state.spared_today, self.state.spared_about = self._spared.rows, self._spared.is_about

    def take_spared_mark(self) -> list[Mark]:
        """The mark of the rows that the disk was spared today, if it has changed; else no mark."""
        state = b"" if self._spared is None else self._spared.state()
        if state == self._spared_kept:
            return []
        self._spared_kept = state
        return [Mark(SPARED_MARK, state)]

    def take_budget_mark(self, *, now: bool = False) -> list[Mark]:
        """The mark of what was used of a metered link, if it is due or wanted `now`; else no mark."""
        if self._budget is None or (time.monotonic() < self._budget_due_s and not now):
            return []
        self._budget_due_s = time.monotonic() + BUDGET_SAVE_S
        return [Mark(BUDGET_MARK, self._budget.state())]


def _spelled(partition: Partition) -> str:
    topic, number = partition
    return topic if number == NO_PARTITION else f"{topic}/{number}"


def _offsets(marks: Mapping[str, bytes]) -> dict[tuple[str, int], int]:
    found = {}
    for key, value in marks.items():
        if key.startswith(OFFSET_MARKS):
            topic, _, number = key.removeprefix(OFFSET_MARKS).rpartition("/")
            if topic and number.isdecimal() and value.isdigit():
                found[topic, int(number)] = int(value)
    return found
