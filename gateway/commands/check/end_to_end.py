"""Sends a test reading in at the front door, and reads its record back from Kafka."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from gateway.buffer.rows import OWN_TYPES
from gateway.buffer.status import is_running
from gateway.clock.kernel_clock import boottime_us
from gateway.commands.certificate_dates import certificate_dates
from gateway.commands.check.finding import Finding, remark, skipped, well, wrong
from gateway.commands.check.front_door import (
    START,
    CertificateWantedError,
    DoorError,
    ask,
    doors,
    entered,
    not_asked,
    opened,
)
from gateway.commands.check.mqtt_probe import NoAnswerError
from gateway.daemon import control
from gateway.health.conditions import conditions
from gateway.health.facts import told_facts
from gateway.host.terminal_text import counted, milliseconds, span
from gateway.intake.check_readings import CHECK_KIND, CheckOpened, CheckPlace
from gateway.kafka.link import KafkaLink
from gateway.kafka.secret_files import KafkaFileError
from gateway.kafka.topics import ADMIN_CONFIG, ADMIN_WORDS, allow_command
from gateway.record_contract import HEADERS
from gateway.settings import Settings
from gateway.uplink.state import UplinkState

ACKNOWLEDGED: Final = "acknowledgement"
IN_KAFKA: Final = "in Kafka"
READ_BACK: Final = "read back"
PATIENCE_S: Final = 30.0
"""Seconds to wait for Kafka's acknowledgement. The gateway may just have begun to connect."""
_LOOK_S: Final = 2.0
"""Seconds between two questions for the state of the uplink meanwhile."""
_FETCH_BYTES: Final = 65_536
"""Bytes of records that are asked for. A broker gives the first batch whole, however large it is."""
_DOWN_LOOKS: Final = 3
"""Answers that the uplink is down, after which it counts as down. Before, it may be on its way up."""


class _NotInError(Exception):
    """The test reading was not acknowledged; the message says why and what to do."""


def check_end_to_end(settings: Settings, why_not: str) -> Iterator[Finding]:
    """Send a test reading on its whole way. `why_not` says why Kafka cannot be reached; empty if it can be."""
    if not is_running(settings.buffer.path):
        yield remark("gateway-stopped", "test reading", f"not sent, because the gateway does not run; {START}")
        return
    try:
        credential = opened(settings)
        begun_us = boottime_us()
        door, took_ms = _sent(settings, credential)
    except control.ControlError as error:
        yield remark("gateway-unasked", "test reading", f"not sent: {not_asked(error)}")
        return
    except _NotInError as error:
        yield wrong("test-reading-unacknowledged", ACKNOWLEDGED, str(error))
        return
    yield well(
        ACKNOWLEDGED,
        f"a test reading went in {door} and was acknowledged after {milliseconds(took_ms)}: it is on disk or in Kafka",
    )
    if why_not:
        yield skipped(IN_KAFKA, f"{why_not}; the test reading waits on disk like all others")
        return
    place = None
    try:
        for outcome in _waited(settings, credential, begun_us):
            if isinstance(outcome, Finding):
                yield outcome
            else:
                place = outcome
    except control.ControlError as error:
        yield wrong(
            "gateway-unasked", IN_KAFKA, f"not known: the gateway ran, and no longer answers ({error}); check again"
        )
    if place is not None:
        yield asyncio.run(_read_back(settings, credential, place, begun_us))


# -- in -------------------------------------------------------------------------------------------


def _sent(settings: Settings, credential: CheckOpened) -> tuple[str, float]:
    """Send the test reading. Return where it went in, and the milliseconds until it was acknowledged.

    Raises _NotInError, ControlError.
    """
    listener = settings.mqtt_listener
    for door in doors(listener) if listener is not None else ():
        assert listener is not None  # noqa: S101 - mypy does not see that
        try:
            with entered(door, listener, credential) as conversation:
                took_ms = conversation.publish(credential.topic, credential.payload.encode())
        except CertificateWantedError:
            continue
        except DoorError as error:
            raise _NotInError(f"a test reading could not be sent to {door}: {error}") from error
        except NoAnswerError as error:
            why = f"{error}. {_why_not_stored(settings)}"
            raise _NotInError(f"a test reading that was published to {door} was not acknowledged: {why}") from error
        return f"at {door}", took_ms
    # Over MQTT a certificate is needed, or there is no listener.
    begun_s = time.monotonic()
    try:
        answer: Any = ask(settings, "check-enter", user=credential.user)
    except control.RequestRefusedError as error:
        raise _NotInError(f"a test reading was not stored: {error}. {_why_not_stored(settings)}") from error
    if not answer["stored"]:
        raise _NotInError(f"a test reading was not stored. {_why_not_stored(settings)}")
    return "behind the listener, as from a serial line,", (time.monotonic() - begun_s) * 1000


def _why_not_stored(settings: Settings) -> str:
    """Ask the gateway why its buffer did not store the test reading."""
    try:
        state: Any = ask(settings, "state")
    except control.ControlError as error:
        return str(error)
    return _told(settings, state, "disk-failing", "buffer-full") or "The disk is very slow, or the log says more"


def _told(settings: Settings, state: Any, *codes: str) -> str:
    """The first condition with one of these codes, in words; empty if there is none."""
    found = conditions(told_facts(settings, state, boottime_us(), time.time()))
    return next((each.line for each in found if each.code in codes), "")


# -- on to Kafka ----------------------------------------------------------------------------------


def _waited(settings: Settings, credential: CheckOpened, begun_us: int) -> Iterator[Finding | CheckPlace]:
    """Wait until Kafka has the test reading, or say why that takes longer."""
    until_s = time.monotonic() + PATIENCE_S
    downs = 0
    trouble: Finding | None = None
    while time.monotonic() < until_s:
        found = ask(settings, "check-place", user=credential.user, patience_s=_LOOK_S)
        if found is not None:
            place = msgspec.convert(found, CheckPlace)
            took_ms = (place.acknowledged_us - begun_us) / 1000
            at = "" if place.offset is None else f", offset {place.offset:,}"
            yield well(
                IN_KAFKA,
                f"Kafka acknowledged it (acks=all) {milliseconds(took_ms)} after it was sent: topic {place.topic}, "
                f"partition {place.partition}{at}",
            )
            yield place
            return
        trouble, is_lasting = _why_waits(settings, ask(settings, "state"))
        downs += is_lasting
        if downs >= _DOWN_LOOKS:
            break
    yield trouble or wrong(
        "test-reading-late",
        IN_KAFKA,
        f"Kafka has not acknowledged it within {span(PATIENCE_S)}: it waits on disk; sluice status says more",
    )


def _why_waits(settings: Settings, state: Any) -> tuple[Finding | None, bool]:  # noqa: PLR0911 - one for each reason
    """Explain by the gateway's state why the uplink does not send. Also tell whether further waiting is in vain."""
    facts = told_facts(settings, state, boottime_us(), time.time())
    uplink = UplinkState() if "uplink" in facts.unknown else facts.uplink
    if uplink.quota_used_up:
        return remark("quota-used-up", IN_KAFKA, f"it waits on disk. {_told(settings, state, 'quota-used-up')}"), True
    if not uplink.up:
        why = uplink.error or "its first attempt is under way"
        words = f"it waits on disk: the running gateway does not reach Kafka, although this check does: {why}"
        restart = "; if the settings were changed since it started, restart it"
        code = "kafka-unusable" if uplink.barred else "kafka-unreached"
        return wrong(code, IN_KAFKA, words + restart), bool(uplink.error)
    if uplink.waits_for_clock:
        words = (
            f"it waits on disk until this box's clock is synced. {_told(settings, state, 'clock-unsynced')}".rstrip()
        )
        return remark("clock-unsynced", IN_KAFKA, words), True
    topic = settings.kafka.events_topic
    for name, why in uplink.parked.items():
        if name.partition("/")[0] == topic:
            return wrong("partition-parked", IN_KAFKA, f"it waits on disk: {name} {why}"), False
    if topic in uplink.refused_topics:
        return wrong("topic-unwritten", IN_KAFKA, f"{topic} is not written to: {uplink.refused_topics[topic]}"), True
    if facts.rows > 1:
        return remark(
            "test-reading-late",
            IN_KAFKA,
            f"it waits on disk beside {counted(facts.rows, 'row')}, which now go to Kafka: check again later",
        ), False
    return None, False


# -- and back -------------------------------------------------------------------------------------


async def _read_back(settings: Settings, credential: CheckOpened, place: CheckPlace, begun_us: int) -> Finding:
    if place.offset is None:
        return remark("test-reading-unread", READ_BACK, "not tried: the broker had it already, and does not say where")
    try:
        record = await _record(settings, place)
    except TopicAuthorizationFailedError:
        command = allow_command(place.topic, settings.kafka, "Read")
        who = f" ({ADMIN_WORDS})" if ADMIN_CONFIG in command else ""
        return remark(
            "test-reading-unread",
            READ_BACK,
            f"this gateway's user may not read {place.topic}, and need not: Kafka's acknowledgement shows that the "
            f"replicas have the record. If this check is to read it back, allow it: {command}{who}",
        )
    except (KafkaError, OSError, TimeoutError, KafkaFileError) as error:
        return wrong(
            "test-reading-unread",
            READ_BACK,
            f"Kafka does not give back the record that it acknowledged ({str(error) or type(error).__name__}); are the "
            "brokers well? Try again",
        )
    if (flaw := _flaw(settings, record, credential, place)) is not None:
        return wrong(
            "test-reading-changed",
            READ_BACK,
            f"the record at offset {place.offset:,} is not as it was sent: {flaw}; report this",
        )
    took_ms = (boottime_us() - begun_us) / 1000
    return well(
        READ_BACK, f"byte for byte, with its headers, {milliseconds(took_ms)} after it was sent (ce_id {place.ce_id})"
    )


async def _record(settings: Settings, place: CheckPlace) -> ConsumerRecord:
    """Read the test reading's record. Raises KafkaError, OSError, TimeoutError, KafkaFileError."""
    kafka = settings.kafka
    link = KafkaLink(kafka, certificate_dates(settings))
    partition = TopicPartition(place.topic, place.partition)
    with link.entered():
        consumer = AIOKafkaConsumer(
            client_id=settings.gateway.id,
            enable_auto_commit=False,
            request_timeout_ms=int(kafka.request_timeout_s * 1000),
            max_partition_fetch_bytes=_FETCH_BYTES,
            **link.options(),
        )
        try:
            async with asyncio.timeout(kafka.request_timeout_s):
                await consumer.start()
                consumer.assign([partition])
                consumer.seek(partition, place.offset)
                return await consumer.getone(partition)
        except TimeoutError as error:
            # aiokafka tries again and again, and does not say why.
            raise TimeoutError(link.fault or "") from error
        finally:
            # If a fetch has failed, aiokafka's stop ends with that fetch's cancellation, before it has closed anything.
            with suppress(asyncio.CancelledError):
                await consumer.stop()
            await consumer._client.close()  # noqa: SLF001 - aiokafka is pinned, and a test comes by here
            await link.let_go()


def _flaw(settings: Settings, record: ConsumerRecord, credential: CheckOpened, place: CheckPlace) -> str | None:
    """First difference between a record and what was sent; None if there is none."""
    gateway = settings.gateway
    key = gateway.id if gateway.key == "name" else f"{gateway.namespace}/{gateway.id}"
    told = {name: value.decode(errors="replace") for name, value in record.headers}
    wanted = {
        "ce_specversion": "1.0",
        "ce_id": place.ce_id,
        "ce_source": f"/{gateway.namespace}/{gateway.id}",
        "ce_type": f"{OWN_TYPES}{CHECK_KIND}",
        "content-type": "application/json",
    }
    if record.offset != place.offset:
        return f"the next record has offset {record.offset:,}"
    if record.value != credential.payload.encode():
        return "its value differs"
    if record.key != key.encode():
        return f"its key is {record.key!r}, not {key.encode()!r}"
    if tuple(told)[: len(HEADERS)] != HEADERS:
        return f"its headers are {', '.join(told)}"
    return next(
        (f"{name} is {told[name]!r}, not {value!r}" for name, value in wanted.items() if told[name] != value), None
    )
