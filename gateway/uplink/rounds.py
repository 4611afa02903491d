"""Sends rows in rounds: encodes some rows into batches by partition, sends them, and settles them once Kafka has them.

A partition that does not answer in time is parked. Its rows are passed over until it answers, and the others go on.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import Row, spans_of
from gateway.intake.front_door import FrontDoor
from gateway.kafka.session import KafkaSession
from gateway.settings import GatewaySettings, KafkaSettings
from gateway.uplink.batches import Aside, Batcher, Outgoing
from gateway.uplink.delivery import PATIENCE_SHARE, Delivery, error_of
from gateway.uplink.direct import DirectTopics
from gateway.uplink.echoes import LEFT_OUT
from gateway.uplink.memory import NO_PARTITION, Memory, Partition
from gateway.uplink.parked import Parked, ParkedPartitions
from gateway.uplink.refused import REFUSALS, RefusedRecords, named
from gateway.uplink.supply import Supply

LINGER_ROWS = 500
"""After fewer live rows than this, the next round waits for company."""
IDLE_S = 1.0
"""Longest time in seconds that idle rounds wait before they look for other changes."""
CLOCK_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class NewSession:
    """The reason why a session ends and the next begins at once, such as a partition that needs a new producer."""

    reason: str
    is_refusal: bool = False
    """Whether a broker took a round's request and refused a record of it."""


class Rounds:
    """Sends the rows that wait, round by round, as long as one session lasts."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the uplink
        self,
        session: KafkaSession,
        buffer: Buffer,
        front_door: FrontDoor,
        gateway: GatewaySettings,
        kafka: KafkaSettings,
        memory: Memory,
        waits_for_clock: Callable[[], bool],
        on_answer: Callable[[], None],
    ) -> None:
        """`waits_for_clock` tells whether a time for this boot's readings may still be learnt.

        `on_answer` is called if Kafka answers, or if nothing waits.
        """
        self._session = session
        self._buffer = buffer
        self._memory = memory
        self._waits_for_clock = waits_for_clock
        self._on_answer = on_answer
        self._new_clocks = front_door.new_clocks
        timeout_s = kafka.request_timeout_s
        self._parked = ParkedPartitions(session, memory, timeout_s, timeout_s * PATIENCE_SHARE)
        self._supply = Supply(buffer, kafka, self._parked.under_way, self._new_clocks)
        self._counts = front_door.counts
        self._batcher = Batcher(session, buffer, self._supply, gateway, kafka, memory, front_door.clocks)
        self._linger_s = kafka.linger_s
        self._direct = DirectTopics(session, buffer, self._supply.buffer_id, kafka, memory)
        self._delivery = Delivery(
            session, timeout_s, memory, self._supply, self._parked, front_door.checks, self._direct, on_answer
        )
        self._refused = RefusedRecords(buffer, front_door, kafka, memory, self._supply, self._batcher)

    async def run(self) -> NewSession:
        """Send until a new session must begin. Raises KafkaError, TimeoutError, BufferFileError."""
        try:
            while True:
                await self._memory.wait_for_allowance(self._session.link)
                self._buffer.committed.clear()
                self._batcher.follow()
                if (new_session := await self._see_to_parked()) is not None:
                    return new_session
                await self._direct.settle({topic for topic, _ in self._parked})
                self._look_for_new_clocks()
                waits_for_clock = self._waits_for_clock()
                live, backlog = await self._supply.next(
                    self._memory.round_bytes, self._may_go if self._parked else None, waits_for_clock
                )
                self._tell_live(live)
                if live or backlog:
                    if (new_session := await self._send(live, backlog)) is not None:
                        return new_session
                elif not self._parked:
                    self._memory.nothing_waits()
                    self._on_answer()
                if not live and not backlog and not self._supply.has_more:
                    await self._wait_for_rows(waits_for_clock=waits_for_clock)
                elif not backlog and len(live) < LINGER_ROWS:
                    # Live readings that come in meanwhile share the next request. A backlog does not wait.
                    self._memory.state.live_oldest_us = None
                    await asyncio.sleep(self._linger_s)
        finally:
            self._direct.end()
            await self._parked.end()
            self._let_go({partition: each.out for partition, each in self._parked.items() if each.out is not None})
            # Last, so that acknowledged rows are settled before rows under way may be dropped.
            await self._supply.close()
            self._memory.state.live_oldest_us = None

    def _look_for_new_clocks(self) -> None:
        """Let readings go whose sensor's clock is known by now, or is waited for no longer."""
        waiting = self._new_clocks.waiting
        if waiting and self._new_clocks.settle():
            self._come_again()
        self._memory.state.new_clocks = len(waiting)

    def _tell_live(self, live: Sequence[Row]) -> None:
        # With `oldest-first` these may be of another lane, and another boot.
        is_live = bool(live) and live[0].lane == self._supply.live_lane
        if not is_live:
            self._memory.state.live_oldest_us = None
            return
        # A row without a time may have waited for its sensor's clock. The link is not to blame for that.
        timed = next((row for row in live if row.datum.event_us is not None or row.datum.tick_ms is None), None)
        self._memory.state.live_oldest_us = (
            live[0].datum.received_us + self._new_clocks.hold_us if timed is None else timed.datum.received_us
        )

    async def _wait_for_rows(self, *, waits_for_clock: bool) -> None:
        """Wait for a commit, for an answer of a parked partition, for a new topic, or for the time to look again."""
        if waits_for_clock:
            # Rows committed meanwhile have to wait as well. Each look would read all waiting rows in vain.
            await asyncio.sleep(CLOCK_POLL_S)
            return
        committed = asyncio.create_task(self._buffer.committed.wait(), name="committed")
        waited: list[asyncio.Future[Any]] = [committed, *self._memory.new_topics.under_way.values()]
        waited += [parked.task for parked in self._parked.values() if parked.task is not None]
        try:
            await asyncio.wait(waited, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            committed.cancel()

    # -- a round --------------------------------------------------------------------------------

    async def _send(self, live: Sequence[Row], backlog: Sequence[Row]) -> NewSession | None:
        """Bring all rows into Kafka or the quarantine, except rows of partitions that do not answer.

        Raises a partition's error if all partitions fail and none refuses a record.
        """
        outgoing: dict[Partition, Outgoing] = {}
        aside: Aside = []
        for rows in (live, backlog):
            await self._batcher.encode(self._refused.known(rows, aside), outgoing, aside)
        complete = self._memory.echoed.complete()
        is_cut = self._cut(outgoing) | await self._batcher.look_again(aside, outgoing)
        try:
            errors = await self._delivery.send(outgoing)
        except BaseException:
            self._let_go(outgoing)
            raise
        if aside or errors or is_cut or self._parked:
            self._settle_acknowledged(outgoing.values(), complete)
        else:
            for rows in (live, backlog):
                self._settle(rows)
        if is_cut:
            self._supply.come_again()
        troubles = [await self._bear(partition, outgoing[partition], error) for partition, error in errors.items()]
        if troubles:
            if len(errors) == len(outgoing) and not any(trouble.is_refusal for trouble in troubles):
                raise next(iter(errors.values()))
            return troubles[0]
        # Last, so that rows which are sent again after an error are set aside once.
        await self._refused.set_aside(aside)
        return None

    def _cut(self, outgoing: dict[Partition, Outgoing]) -> bool:
        """Take out of a round what cannot go in it. Returns whether some of it may go in the next round."""
        is_cut, count = False, len(outgoing)
        now_s = time.monotonic()
        for partition, out in list(outgoing.items()):
            if partition in self._parked:
                del outgoing[partition]
            elif partition[1] == NO_PARTITION:
                del outgoing[partition]
                verdict = self._memory.verdicts.refusal_of(partition[0])
                if verdict is None or not verdict.waits:
                    # The topic is being made, or it is known by now whether it was made.
                    self._parked.park(partition, Parked(now_s), None)
                    continue
                if now_s >= self._memory.rests_until_s(partition):
                    self._memory.trouble(partition, pauses=True)
                self._parked.park(partition, Parked(now_s), verdict.hint or verdict.reason)
            elif not self._session.has_leader(*partition):
                # aiokafka would ask for the partition's leader in a loop.
                del outgoing[partition]
                self._parked.park(partition, Parked(now_s), "has no leader")
            elif now_s < self._memory.rests_until_s(partition):
                del outgoing[partition]
                self._parked.park(partition, Parked(now_s), self._memory.why_parked(partition))
            elif len(out.batches) > 1 and (self._memory.is_suspect(partition) or self._memory.is_troubled(partition)):
                # The partition is tried with one batch, so that it holds up no others.
                del out.batches[1:]
                is_cut = True
        if is_cut or len(outgoing) < count:
            self._supply.pass_over()
        return is_cut

    # -- after a round ----------------------------------------------------------------------------

    def _settle(self, rows: Sequence[Row]) -> None:
        """Tell the buffer that Kafka has these rows, which are in order. It may delete them."""
        if rows:
            # First, so that no commit deletes rows without the offset behind them.
            self._buffer.keep(self._memory.take_marks())
            self._buffer.confirm(self._supply.buffer_id, spans_of(rows))
            self._memory.state.sent += len(rows)
            self._memory.count_spared(self._buffer.counts["spared"])
            self._buffer.keep(self._memory.take_spared_mark())
            if left_out := self._memory.echoed.settled(rows):
                self._counts[LEFT_OUT] += left_out

    def _settle_acknowledged(self, outgoing: Iterable[Outgoing], complete: Iterable[Row] = ()) -> None:
        # Of all partitions at once: rows in their order make few spans, and each call looks at all that waits.
        rows = [*complete]
        for out in outgoing:
            for _, batch_rows in out.batches[out.settled : out.acknowledged]:
                rows += self._memory.echoed.acknowledged(batch_rows, out.partition[0])
            out.settled = out.acknowledged
        self._settle(sorted(rows, key=attrgetter("lane", "sequence")))

    def _let_go(self, outgoing: Mapping[Partition, Outgoing]) -> None:
        """Settle acknowledged batches. The next one may have arrived, but nothing more will be heard of it."""
        self._settle_acknowledged(outgoing.values())
        for partition, out in outgoing.items():
            if out.acknowledged < len(out.batches):
                self._memory.sent_without_answer(partition, out.batches[out.acknowledged][1])

    async def _bear(self, partition: Partition, out: Outgoing, error: BaseException) -> NewSession:
        """Handle an error of a partition. It ends the session, as the producer's state of the partition is void."""
        if isinstance(error, REFUSALS):
            await self._refused.narrow_down(out, out.batches[out.acknowledged][1], error)
            return NewSession(named(error), is_refusal=True)
        self._let_go({partition: out})
        self._memory.trouble(partition, pauses=True)
        self._memory.tell_parked(partition, f"answered with {named(error)}")
        return NewSession(named(error))

    # -- partitions that take nothing at present ------------------------------------------------

    def _may_go(self, row: Row) -> bool:
        return self._parked.keys().isdisjoint(self._batcher.partitions_of(row))

    async def _see_to_parked(self) -> NewSession | None:
        """Let partitions go on that may be tried again. Returns why the session ends if batches there went wrong."""
        ready = self._parked.ready(time.monotonic())
        ends = [await self._unpark(partition) for partition in ready]
        troubles = [end for end in ends if end is not None]
        # A partition that exists again may lose its leader again.
        self._parked.leaders.gone.difference_update(ready)
        if troubles:
            for partition, parked in self._parked.items():
                if parked.task is not None and partition not in ready:
                    self._memory.trouble(partition, pauses=False)
            return troubles[0]
        if ready or self._refused.is_due():
            self._come_again()
        return None

    def _come_again(self) -> None:
        self._supply.come_again()
        if self._parked:
            self._supply.pass_over()

    async def _unpark(self, partition: Partition) -> NewSession | None:
        """Let a partition go on. Returns why the session ends if its batches under way went wrong."""
        parked, (topic, number) = self._parked[partition], partition
        is_gone = partition in self._parked.leaders.gone
        if is_gone or number == NO_PARTITION:
            self._batcher.forget(topic)
        if parked.task is not None and parked.out is not None and not parked.task.done():
            # The producer would retry the batch for ever. The end of the session ends that.
            if is_gone:
                return NewSession(f"{topic} is another topic now, or none")
            # The producer may be at fault, whatever the broker says.
            self._memory.trouble(partition, pauses=True)
            return NewSession(f"{topic}/{number} does not answer")
        del self._parked[partition]
        if parked.task is None or parked.out is None:
            return None
        self._settle_acknowledged((parked.out,))
        error = error_of(parked.task)
        return None if error is None else await self._bear(partition, parked.out, error)
