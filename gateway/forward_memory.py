"""What the uplink knows from session to session: how it is, what was acknowledged, how wide the link is."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.clock_gateway import WallClock, boottime_us
from gateway.kafka_link import KafkaLink
from gateway.kafka_session import BATCH_BYTES_MAX, TopicVerdicts
from gateway.link_rate import LinkRate
from gateway.reading import Mark
from gateway.settings import KafkaSettings
from gateway.uplink_budget import UplinkBudget

REQUEST_BYTES_MAX = 8 * BATCH_BYTES_MAX
"""What a round may put on the wire, however wide the link."""
LIVE_S = 1.0
"""While live readings share the link with a backlog, a round is no larger than what the link takes in so long."""
RATIO_FIRST = 3.0
"""How far records are compressed, until it is known."""
PAUSE_S_MAX = 1.0
MARKS = "uplink/"
OFFSET_MARKS = MARKS + "offset/"
"""Before topic, `/` and partition: the offset that was acknowledged last."""
CLUSTER_MARK = MARKS + "cluster"
"""Whose offsets these are."""
BUDGET_MARK = MARKS + "budget"
BUDGET_SAVE_S = 10.0
"""What was used of a metered link is written down no more often than this."""


class QuotaUsedUpError(Exception):
    """`kafka.bytes_per_day_max` is used up: nothing may be sent for now."""


@dataclass(slots=True)
class UplinkState:
    """What the forwarder says of itself."""

    up: bool = False
    error: str | None = None
    """Why it is down, in words; None before the first attempt and while it is up."""
    since: float = 0.0
    """When it came up or went down: seconds since 1970 by this box's clock as it is now, be it right or not."""
    waits_for_clock: bool = False
    """Whether readings are held back because a time for them may still be learnt (`gateway.hold_unsynced_s`)."""
    quota_used_up: bool = False
    """Whether nothing is sent because `kafka.bytes_per_day_max` is used up."""
    quota_until: float | None = None
    """Until when, in seconds since 1970; None where the date is not known."""
    sent: int = 0
    """Readings and events that Kafka has taken since the start."""
    live_oldest_us: int | None = None
    """When the oldest live reading was received that is being sent (CLOCK_BOOTTIME); None where none is."""
    parked: dict[str, str] = field(default_factory=dict)
    """`topic/partition`, and why it takes nothing at present; its readings wait while others go on."""
    refused_topics: dict[str, str] = field(default_factory=dict)
    """Topics that are not written to, and what is wrong with them."""
    bytes_per_s: int = 0
    """What the link was seen to carry."""
    wire_bytes: int = 0
    """What it has carried since the start, both ways."""


class Memory:
    """Belongs to the event loop."""

    def __init__(self, kafka: KafkaSettings, clock: Callable[[], WallClock]) -> None:
        self._kafka = kafka
        self._clock = clock
        self.state = UplinkState()
        self.verdicts = TopicVerdicts(kafka)
        self.rate = LinkRate(kafka.request_timeout_s, REQUEST_BYTES_MAX)
        self.cluster_id = ""
        self.offsets: dict[tuple[str, int], int] = {}
        """By topic and partition: the offset after the last record that was acknowledged to this gateway."""
        self.proven: set[str] = set()
        """Topics that have taken something since they last refused."""
        self._ratio = RATIO_FIRST
        self._suspects: dict[tuple[str, int], int] = {}
        self._lone_refusals: Counter[str] = Counter()
        self._unsaved: dict[str, Mark] = {}
        self._budget: UplinkBudget | None = None
        self._budget_due_s = 0.0
        self._spent_of: KafkaLink | None = None
        self._spent_bytes = 0

    def recall(self, marks: Mapping[str, bytes]) -> None:
        """Go on from what the buffer has kept under `MARKS`."""
        self.cluster_id = marks.get(CLUSTER_MARK, b"").decode(errors="replace")
        self.offsets = _offsets(marks)
        if self._kafka.bytes_per_s_max or self._kafka.bytes_per_day_max:
            self._budget = UplinkBudget(
                self._kafka.bytes_per_s_max, self._kafka.bytes_per_day_max, marks.get(BUDGET_MARK)
            )

    # -- the link -------------------------------------------------------------------------------

    def round_bytes(self, shared: bool) -> float:  # noqa: FBT001 - the contract of Supply.next
        """What a round may take before it is compressed; `shared` where live readings wait beside a backlog."""
        wire = self.rate.bytes_in(LIVE_S) if shared else self.rate.request_bytes_max
        if self._budget is not None:
            allowance = self._budget.allowance(*self._now())
            wire = wire if allowance is None else min(wire, allowance)
        return wire * self._ratio

    def learn(self, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """So many bytes, which took so many on the wire, were acknowledged in that time."""
        self._ratio += (max(1.0, raw_bytes / max(wire_bytes, 1)) - self._ratio) / 4
        self.rate.acknowledged(wire_bytes, seconds)
        self.state.bytes_per_s = int(self.rate.bytes_per_s)

    async def wait_for_allowance(self, link: KafkaLink) -> None:
        """Wait until something may be sent. Raises QuotaUsedUpError where that is not today."""
        self.count(link)
        while self._budget is not None:
            if self._budget.is_used_up(*self._now()):
                raise QuotaUsedUpError
            wait_s = self._budget.wait_s(*self._now())
            if not wait_s:
                return
            await asyncio.sleep(min(wait_s, PAUSE_S_MAX))

    async def wait_for_tomorrow(self) -> None:
        """Wait until the quota begins anew."""
        while self._budget is not None and self._budget.is_used_up(*self._now()):
            self.state.quota_used_up = True
            self.state.quota_until = self._budget.used_up_until(*self._now())
            await asyncio.sleep(PAUSE_S_MAX)
        self.state.quota_used_up, self.state.quota_until = False, None

    def count(self, link: KafkaLink) -> None:
        """Count what a session's connections have carried since the last look."""
        if link is not self._spent_of:
            self._spent_of, self._spent_bytes = link, 0
        total = link.wire_bytes()
        spent, self._spent_bytes = total - self._spent_bytes, total
        self.state.wire_bytes += spent
        if self._budget is not None:
            self._budget.spend(spent, *self._now())

    def _now(self) -> tuple[float, float | None]:
        now_us, clock = boottime_us(), self._clock()
        return now_us / 1e6, clock.at(now_us) / 1e6 if clock.synced else None

    # -- partitions and topics ------------------------------------------------------------------

    def acknowledged(self, partition: tuple[str, int], offset: int, records: int) -> None:
        """A partition has taken a batch, at that offset; -1 where the broker had it already and does not say where."""
        topic, number = partition
        if offset >= 0:
            self.offsets[partition] = offset + records
            key = f"{OFFSET_MARKS}{topic}/{number}"
            self._unsaved[key] = Mark(key, b"%d" % (offset + records))
        self.proven.add(topic)
        self._lone_refusals.pop(topic, None)
        rows = self._suspects.get(partition)
        if rows is not None:
            if 2 * rows >= self._kafka.batch_rows_max:
                del self._suspects[partition]
            else:
                self._suspects[partition] = 2 * rows

    def rows_max(self, partition: tuple[str, int]) -> int:
        """How many rows a batch for a partition may have."""
        return self._suspects.get(partition, self._kafka.batch_rows_max)

    def is_suspect(self, partition: tuple[str, int]) -> bool:
        """Whether a batch of a partition was refused, and not all of it has been taken since."""
        return partition in self._suspects

    def suspect(self, partition: tuple[str, int], rows: int) -> None:
        """One of a batch was refused: so many go at a time from now on, until they are taken again."""
        self._suspects[partition] = rows
        self.proven.discard(partition[0])

    def count_lone_refusal(self, topic: str) -> int:
        """A record was refused that stood alone; how many of its topic were, one after the other."""
        self._lone_refusals[topic] += 1
        self.proven.discard(topic)
        return self._lone_refusals[topic]

    # -- what outlives a restart ----------------------------------------------------------------

    def enter(self, cluster_id: str) -> list[Mark]:
        """Go on with a cluster; the marks to keep. Another one than before knows nothing of the offsets."""
        if cluster_id == self.cluster_id:
            return []
        forgotten = [Mark(f"{OFFSET_MARKS}{topic}/{number}", None) for topic, number in self.offsets]
        self.cluster_id = cluster_id
        self.offsets.clear()
        self._unsaved.clear()
        return [*forgotten, Mark(CLUSTER_MARK, cluster_id.encode())]

    def take_marks(self) -> list[Mark]:
        """What has to be kept with the rows that are settled now."""
        marks, self._unsaved = list(self._unsaved.values()), {}
        if self._budget is not None and time.monotonic() >= self._budget_due_s:
            self._budget_due_s = time.monotonic() + BUDGET_SAVE_S
            marks.append(Mark(BUDGET_MARK, self._budget.state()))
        return marks


def _offsets(marks: Mapping[str, bytes]) -> dict[tuple[str, int], int]:
    found = {}
    for key, value in marks.items():
        if key.startswith(OFFSET_MARKS):
            topic, _, number = key.removeprefix(OFFSET_MARKS).rpartition("/")
            if topic and number.isdecimal() and value.isdigit():
                found[topic, int(number)] = int(value)
    return found
