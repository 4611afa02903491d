"""Sends one round: each partition gets its batches, and is waited for while an answer may still come."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gateway.intake.check_readings import CheckReadings
from gateway.kafka.batch import EncodedBatch
from gateway.kafka.session import KafkaSession
from gateway.reading import BufferFileError
from gateway.uplink.batches import Outgoing
from gateway.uplink.direct import DirectTopics
from gateway.uplink.link_rate import Passage
from gateway.uplink.memory import Memory, Partition
from gateway.uplink.parked import Parked, ParkedPartitions, end_tasks
from gateway.uplink.supply import Supply

PATIENCE_SHARE = 1 / 3
"""Share of the time-out that a round may take while no bytes come through. A slow link gets the whole time-out, and so
does a broker that has all bytes and has not answered yet."""
LOOK_SHARE = 1 / 60
"""Share of the time-out between two looks at how far a round has come."""
STRAGGLERS_S_MIN = 2.0
STRAGGLERS_FACTOR = 4
"""After the first answer, the others get this many times as long as it took, but `STRAGGLERS_S_MIN` at least."""


class Delivery:
    """Sends the rounds of one session."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of the uplink
        self,
        session: KafkaSession,
        request_timeout_s: float,
        memory: Memory,
        supply: Supply,
        parked: ParkedPartitions,
        checks: CheckReadings,
        direct: DirectTopics,
        on_answer: Callable[[], None],
    ) -> None:
        self._session = session
        self._timeout_s = request_timeout_s
        self._patience_s = request_timeout_s * PATIENCE_SHARE
        self._memory = memory
        self._supply = supply
        self._parked = parked
        self._checks = checks
        self._direct = direct
        self._on_answer = on_answer

    async def send(self, outgoing: dict[Partition, Outgoing]) -> dict[Partition, BaseException]:
        """Send, wait for the answers, and return the errors by partition.

        A partition that does not answer is parked. Raises TimeoutError if none answers, although one has a leader.
        """
        started_s = time.monotonic()
        tasks = {
            partition: asyncio.create_task(self._send_partition(partition, out), name=f"send {partition}")
            for partition, out in outgoing.items()
        }
        for partition in [each for each in tasks if self._memory.is_troubled(each)]:
            # The round does not wait for a partition in trouble.
            self._park(partition, Parked(started_s, tasks.pop(partition), outgoing[partition]), None)
        if not tasks:
            return {}
        sent = [outgoing[each] for each in tasks]
        batches, echoes = (
            [batch for out in sent if (out.echo_of is not None) is is_echo for batch, _ in out.batches]
            for is_echo in (False, True)
        )
        try:
            pending, passage = await self._wait_for_answers(tasks, [*batches, *echoes])
        except asyncio.CancelledError:
            await end_tasks(tasks.values())
            raise
        seconds = time.monotonic() - started_s
        leaderless = [each for each in tasks if tasks[each] in pending and not self._session.has_leader(*each)]
        if len(pending) == len(tasks) > len(leaderless):
            await end_tasks(tasks.values())
            self._memory.learn(batches, None, echoes)
            for partition in tasks:
                self._memory.trouble(partition, pauses=False)
            raise TimeoutError(f"no answer from Kafka within {seconds:.0f} s")
        for partition in [each for each, task in tasks.items() if task in pending]:
            why = "has no leader" if partition in leaderless else "does not answer"
            self._park(partition, Parked(started_s, tasks.pop(partition), outgoing[partition]), why)
        errors = {partition: error for partition, task in tasks.items() if (error := error_of(task)) is not None}
        if not pending and not errors:
            self._memory.learn(batches, passage, echoes)
        if len(errors) < len(tasks):
            self._on_answer()
        return errors

    async def _wait_for_answers(
        self, tasks: Mapping[Partition, asyncio.Task[None]], batches: Sequence[EncodedBatch]
    ) -> tuple[set[asyncio.Task[None]], Passage]:
        """Wait while an answer may come. Returns the tasks without an answer, and how the bytes came through."""
        link, timeout_s = self._session.link, self._timeout_s
        started_s = now_s = time.monotonic()
        passage = Passage(now_s, link.carried_bytes())
        pending, until_s = set(tasks.values()), math.inf
        while pending and now_s < until_s:
            _, pending = await asyncio.wait(
                pending,
                timeout=min(timeout_s * LOOK_SHARE, until_s - now_s),
                return_when=asyncio.FIRST_COMPLETED if until_s == math.inf else asyncio.ALL_COMPLETED,
            )
            now_s = time.monotonic()
            passage.measure(now_s, sum(batch.wire_bytes or 0 for batch in batches), link.carried_bytes())
            if len(pending) < len(tasks):
                until_s = min(until_s, now_s + max(STRAGGLERS_S_MIN, STRAGGLERS_FACTOR * (now_s - started_s)))
            elif now_s - passage.handed_s >= timeout_s or not any(self._session.has_leader(*each) for each in tasks):
                # The time-out is over, or all leaders are gone. Others do not wait for what the client tries next.
                break
            elif now_s - passage.moved_s >= self._patience_s and not (passage.is_carried and link.peers()):
                # If all bytes were carried, an answer may come while the connection lives. TCP ends a connection
                # without a path.
                break
        return pending, passage

    async def _send_partition(self, partition: Partition, out: Outgoing) -> None:
        """Send one partition's batches in order. Each batch goes out when the one before it is acknowledged."""
        for batch, rows in out.batches:
            begun_s = time.monotonic()
            offset = await self._session.send(*partition, batch)
            # A row of a direct topic is safe once all its topics have it.
            self._direct.answered(out.echo_of or partition[0], partition[0], time.monotonic() - begun_s)
            if out.echo_of is None:
                self._memory.acknowledged(partition, offset, len(batch.records))
            else:
                self._memory.took(partition, len(batch.records))
                self._memory.last_readings.taken(partition[0], rows)
            self._memory.answered(partition, rows)
            out.acknowledged += 1
            if self._checks.waiting and out.echo_of is None:
                # The batch has arrived. If a lane cannot be looked up, the partition is not to blame.
                with suppress(BufferFileError):
                    lanes = [await self._supply.lane(row.lane) for row in rows]
                    self._checks.acknowledged(partition, offset, rows, lanes)

    def _park(self, partition: Partition, parked: Parked, why: str | None) -> None:
        self._parked.park(partition, parked, why)
        self._supply.pass_over()


def error_of(task: asyncio.Task[None]) -> BaseException | None:
    """The error of a task that is done; None if the task sent everything."""
    return TimeoutError("the Kafka client gave up a request") if task.cancelled() else task.exception()
