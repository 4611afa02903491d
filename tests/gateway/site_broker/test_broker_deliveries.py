"""Repeated deliveries of model brokers, which count their identifiers up or take the lowest free one."""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.reading import Mark
from gateway.settings import BrokerSettings
from gateway.site_broker.deliveries import (
    FRESH_IDS_MIN,
    PACKET_IDS,
    UNCONFIRMED_MAX,
    Deliveries,
    Judgement,
    removed_sessions,
)
from tests.support.sizes import size

PREFIX = "broker/b:1883/gw/"
A, B = b"a" * 8, b"b" * 8


def keep(disk: dict[str, bytes], marks: list[Mark]) -> None:
    for mark in marks:
        if mark.value is None:
            disk.pop(mark.key, None)
        else:
            disk[mark.key] = mark.value


@pytest.fixture
def disk() -> dict[str, bytes]:
    return {}


@pytest.fixture
def deliveries(disk: dict[str, bytes]) -> Deliveries:
    """Deliveries of a connection whose CONNECT was sent."""
    deliveries = Deliveries(PREFIX, disk)
    deliveries.connecting()
    return deliveries


def counting() -> tuple[Deliveries, dict[str, bytes], int]:
    """A session whose broker was seen to count up, with nothing in flight; and the last identifier that it gave."""
    disk: dict[str, bytes] = {}
    deliveries = Deliveries(PREFIX, disk)
    deliveries.connecting()
    deliveries.connected(session_present=False)
    for packet_id in range(1, FRESH_IDS_MIN + 2):
        deliver(deliveries, disk, packet_id, A)
        deliveries.pinged()
        deliveries.ponged()
    assert deliveries.counts_up
    return deliveries, disk, FRESH_IDS_MIN + 1


def store(deliveries: Deliveries, disk: dict[str, bytes]) -> int:
    """Store the deliveries so far. Returns the number of their batch."""
    number, marks = deliveries.batch()
    keep(disk, marks)
    deliveries.stored(number)
    return number


def deliver(deliveries: Deliveries, disk: dict[str, bytes], packet_id: int, digest: bytes) -> None:
    """A new message that is stored and acknowledged."""
    assert deliveries.receive(packet_id, digest, duplicate=False) is Judgement.NEW
    deliveries.acknowledged(store(deliveries, disk))


def reconnect(deliveries: Deliveries, disk: dict[str, bytes], *, session_present: bool = True) -> None:
    keep(disk, deliveries.forget_marks())
    deliveries.connecting()
    deliveries.connected(session_present=session_present)


def killed(disk: dict[str, bytes], *, session_present: bool = True) -> Deliveries:
    """The next process, connected."""
    deliveries = Deliveries(PREFIX, dict(disk))
    reconnect(deliveries, disk, session_present=session_present)
    return deliveries


# --- examples ----------------------------------------------------------------------------------------------


def test_what_was_stored_before_a_kill_is_recognised_and_what_never_came_is_new() -> None:
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    deliver(deliveries, disk, last + 2, B)
    again = killed(disk)
    assert again.receive(last + 1, A, duplicate=True) is Judgement.STORED
    assert again.receive(last + 2, B, duplicate=True) is Judgement.STORED
    assert again.receive(last + 3, B, duplicate=True) is Judgement.NEW


def test_a_broker_that_was_not_seen_to_count_makes_it_doubtful(deliveries: Deliveries, disk: dict[str, bytes]) -> None:
    deliver(deliveries, disk, 1, A)
    assert killed(disk).receive(1, A, duplicate=True) is Judgement.DOUBTFUL


def test_without_a_kill_it_is_known_that_no_puback_was_written(deliveries: Deliveries, disk: dict[str, bytes]) -> None:
    deliveries.receive(1, A, duplicate=False)
    store(deliveries, disk)
    reconnect(deliveries, disk)
    assert deliveries.receive(1, A, duplicate=True) is Judgement.STORED


def test_what_the_buffer_refused_is_stored_when_it_comes_again() -> None:
    deliveries, disk, last = counting()
    deliveries.receive(last + 1, A, duplicate=False)
    number, _ = deliveries.batch()
    deliveries.not_stored(number)
    reconnect(deliveries, disk)
    assert deliveries.receive(last + 1, A, duplicate=True) is Judgement.NEW


def test_another_payload_under_a_known_identifier_is_stored() -> None:
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    assert killed(disk).receive(last + 1, B, duplicate=True) is Judgement.DOUBTFUL


def test_behind_the_first_that_is_unknown_nothing_is_recognised() -> None:
    """A message that never came stands behind all stored ones. So the messages after it cannot be stored."""
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    again = killed(disk)
    assert again.receive(last + 7, A, duplicate=True) is Judgement.NEW
    assert again.receive(last + 1, A, duplicate=True) is Judgement.DOUBTFUL


def test_marks_count_for_one_connection_even_if_no_connack_came() -> None:
    """A broker that was restarted with an old state may have given the identifier to another reading meanwhile."""
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    deliveries = Deliveries(PREFIX, dict(disk))
    keep(disk, deliveries.forget_marks())
    deliveries.connecting()
    assert killed(disk).receive(last + 1, A, duplicate=True) is Judgement.DOUBTFUL
    reconnect(deliveries, disk)
    assert deliveries.receive(last + 1, A, duplicate=True) is Judgement.DOUBTFUL


def test_a_connection_that_was_refused_costs_nothing() -> None:
    """The broker sent nothing by it: neither this process nor the next one, killed meanwhile, may forget."""
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    for _ in range(2):
        keep(disk, deliveries.forget_marks())
        deliveries.connecting()
        keep(disk, deliveries.connection_refused())
    after_a_kill = Deliveries(PREFIX, dict(disk))
    for known in (deliveries, after_a_kill):
        reconnect(known, disk)
        assert known.receive(last + 1, A, duplicate=True) is Judgement.STORED


def test_what_was_refused_twice_is_in_no_mark() -> None:
    """The buffer refuses it, and then a CONNACK does. Marks that are on disk again must be of stored messages."""
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    deliveries.receive(last + 2, B, duplicate=False)
    number, _ = deliveries.batch()
    deliveries.not_stored(number)
    keep(disk, deliveries.forget_marks())
    deliveries.connecting()
    keep(disk, deliveries.connection_refused())
    again = killed(disk)
    assert again.receive(last + 1, A, duplicate=True) is Judgement.STORED
    assert again.receive(last + 2, B, duplicate=True) is not Judgement.STORED


def test_sessions_of_removed_sections_are_forgotten() -> None:
    brokers = [BrokerSettings("One", ("#",)), BrokerSettings("two", ("#",), client_id="a/b")]
    of_one, of_two = "broker/One:1883/sluice-gw1/", "broker/two:1883/a%2Fb/"
    kept = dict.fromkeys(
        (f"{of_one}ids", f"{of_two}stored/1", "broker/two:1883/a/ids", "broker/old:1883/x/qos2/7"), b""
    )
    forgotten = [mark.key for mark in removed_sessions(kept, brokers, "gw1") if mark.value is None]
    assert forgotten == ["broker/two:1883/a/ids", "broker/old:1883/x/qos2/7"]
    assert len(removed_sessions(kept, [], "gw1")) == 4


def test_an_attempt_that_never_sent_connect_costs_nothing() -> None:
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    Deliveries(PREFIX, dict(disk))
    assert killed(disk).receive(last + 1, A, duplicate=True) is Judgement.STORED


def test_without_the_session_nothing_counts() -> None:
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    again = killed(disk, session_present=False)
    assert not again.counts_up
    assert again.receive(last + 1, A, duplicate=True) is Judgement.DOUBTFUL


def test_identifiers_wrap() -> None:
    deliveries, disk, _ = counting()
    for packet_id in (30_000, 60_000, PACKET_IDS, 1, 2):
        deliver(deliveries, disk, packet_id, A)
    assert deliveries.counts_up
    again = killed(disk)
    assert again.receive(2, A, duplicate=True) is Judgement.STORED
    assert again.receive(3, A, duplicate=True) is Judgement.NEW


def test_an_identifier_that_is_given_again_ends_the_trust() -> None:
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last - 5, A)
    assert not deliveries.counts_up


def test_an_identifier_is_not_held_to_be_free_that_was_given_again_before_the_pingresp(
    deliveries: Deliveries, disk: dict[str, bytes]
) -> None:
    """Else a broker that takes the lowest free one would seem to count up while a burst comes."""
    for packet_id in range(1, 6):
        deliver(deliveries, disk, packet_id, A)
    deliveries.pinged()
    for packet_id in range(1, 6):
        deliver(deliveries, disk, packet_id, B)
    deliveries.ponged()
    for packet_id in range(6, 7 + FRESH_IDS_MIN):
        deliver(deliveries, disk, packet_id, B)
    assert not deliveries.counts_up


def test_marks_are_forgotten_once_the_broker_has_handled_the_pubacks() -> None:
    deliveries, disk, last = counting()
    deliver(deliveries, disk, last + 1, A)
    deliveries.pinged()
    deliver(deliveries, disk, last + 2, A)
    deliveries.ponged()
    deliver(deliveries, disk, last + 3, A)
    assert len([key for key in disk if "/stored/" in key]) == 2, "of the last two"


def test_a_ping_is_wanted_when_many_acknowledgements_are_unconfirmed() -> None:
    deliveries, disk, last = counting()
    wanted = []
    for packet_id in range(last + 1, last + 1 + UNCONFIRMED_MAX):
        wanted.append(deliveries.wants_ping)
        deliver(deliveries, disk, packet_id, A)
    assert not any(wanted)
    assert deliveries.wants_ping
    deliveries.pinged()
    assert not deliveries.wants_ping


def test_qos_2_is_stored_once_until_it_is_released(deliveries: Deliveries, disk: dict[str, bytes]) -> None:
    assert deliveries.receive_exactly_once(7, A, duplicate=False) is Judgement.NEW
    store(deliveries, disk)
    again = killed(disk)
    assert again.receive_exactly_once(7, A, duplicate=True) is Judgement.STORED
    again.release(7)
    _, marks = again.batch()
    keep(disk, marks)
    assert not [key for key in disk if "/qos2/" in key]
    assert killed(disk).receive_exactly_once(7, A, duplicate=True) is not Judgement.STORED


def test_qos_2_shows_that_a_broker_counts_too(deliveries: Deliveries, disk: dict[str, bytes]) -> None:
    for packet_id in range(1, FRESH_IDS_MIN + 2):
        deliveries.receive_exactly_once(packet_id, A, duplicate=False)
        deliveries.release(packet_id)
        deliveries.acknowledged(store(deliveries, disk))
        deliveries.pinged()
        deliveries.ponged()
    assert deliveries.counts_up
    assert killed(disk).receive_exactly_once(FRESH_IDS_MIN + 2, A, duplicate=True) is Judgement.NEW


def test_qos_2_of_a_broker_that_lost_its_state_is_stored(deliveries: Deliveries) -> None:
    deliveries.receive_exactly_once(7, A, duplicate=False)
    deliveries.batch()
    assert deliveries.receive_exactly_once(7, A, duplicate=False) is Judgement.DOUBTFUL
    assert deliveries.receive_exactly_once(7, B, duplicate=False) is Judgement.NEW


def test_a_refused_batch_takes_its_qos_2_identifiers_back(deliveries: Deliveries, disk: dict[str, bytes]) -> None:
    deliveries.receive_exactly_once(7, A, duplicate=False)
    number, _ = deliveries.batch()
    deliveries.not_stored(number)
    reconnect(deliveries, disk)
    assert deliveries.receive_exactly_once(7, A, duplicate=True) is not Judgement.STORED


def test_what_was_judged_and_never_taken_is_not_expected() -> None:
    deliveries, disk, last = counting()
    deliveries.receive(last + 1, A, duplicate=False)
    deliveries.receive_exactly_once(last + 2, A, duplicate=False)
    reconnect(deliveries, disk)
    assert deliveries.receive(last + 1, A, duplicate=True) is not Judgement.STORED
    assert deliveries.receive_exactly_once(last + 2, A, duplicate=True) is not Judgement.STORED


def test_marks_that_make_no_sense_are_left_out() -> None:
    assert Deliveries(PREFIX, {f"{PREFIX}stored/3": b"short", f"{PREFIX}ids": b""}).counts_up is False


# --- a broker, a network and a gateway that may fail at any point -----------------------------------------


@dataclass
class Message:
    serial: int
    payload: int
    qos: int
    packet_id: int = 0
    sent: bool = False
    released: bool = False
    """QoS 2: after its PUBREC, the client sends PUBREL."""


@dataclass
class BrokerState:
    last_id: int
    queue: list[Message] = field(default_factory=list)
    inflight: list[Message] = field(default_factory=list)

    def messages(self) -> set[int]:
        return {message.serial for message in (*self.queue, *self.inflight)}


Down = tuple[str, int, bytes, bool, int]
"""Kind, packet identifier, digest, DUP, and the serial number, which the gateway does not see."""


@dataclass
class Batch:
    number: int
    readings: list[tuple[int, bool]]
    """Serial numbers, and whether they are marked as redelivered."""
    known: list[int]
    """Serial numbers that were recognised."""
    marks: list[Mark]
    answers: list[tuple[str, int]]


class Model:
    """Truth is the serial number of a message: equal payloads under the same identifier look the same.

    `allocate` says how the broker gives identifiers: `count-up`, as mosquitto does, or `lowest-free`, which gives one
    again at once. What happens when comes from `chance`.
    """

    def __init__(
        self,
        chance: random.Random,
        allocate: str,
        window: int,
        last_id: int,
        kinds: tuple[tuple[int, int], ...] = ((0, 1), (0, 1), (1, 1), (0, 2)),
    ) -> None:
        """`kinds` are the payloads and QoS that are published."""
        self.chance = chance
        self.kinds = kinds
        self.window = window
        self.lowest_free = allocate == "lowest-free"
        self.broker = BrokerState(0 if self.lowest_free else last_id)
        self.saved = copy.deepcopy(self.broker)
        self.down: list[Down] = []
        self.up: list[tuple[str, int]] = []
        self.disk: dict[str, bytes] = {}
        self.stored: list[tuple[int, bool]] = []
        self.deliveries = Deliveries(PREFIX, {})
        self.taken: list[Batch] = []
        self.untold: list[Batch] = []
        self.online = False
        self.serial = 0
        self.dropped: set[int] = set()
        self.regressed = False
        self.exact: set[int] = set()
        self.at_risk: set[int] = set()
        self.excused: set[int] = set()
        self.present = False

    def run(self, steps: int) -> None:
        """Anything in any order. Steps forward are more frequent than failures."""
        ways = {
            self.publish: 6,
            self.broker_reads: 6,
            self.gateway_reads: 6,
            self.gateway_commits: 6,
            self.gateway_acknowledges: 6,
            self.connect: 4,
            self.cut: 1,
            self.gateway_is_killed: 1,
            self.broker_saves: 1,
        }
        for _ in range(steps):
            self.chance.choices(list(ways), list(ways.values()))[0]()
            self.check()

    # the broker

    def publish(self) -> None:
        payload, qos = self.chance.choice(self.kinds)
        for _ in range(self.chance.randint(1, 4)):
            self.serial += 1
            self.broker.queue.append(Message(self.serial, payload, qos))
            if qos == 2:
                self.exact.add(self.serial)
        self.broker_sends()

    def broker_sends(self) -> None:
        if not self.online:
            return
        while self.broker.queue and len(self.broker.inflight) < self.window:
            message = self.broker.queue.pop(0)
            message.packet_id = self.allocate()
            self.broker.inflight.append(message)
            self.send(message)

    def allocate(self) -> int:
        used = {message.packet_id for message in self.broker.inflight}
        if self.lowest_free:
            return next(number for number in range(1, PACKET_IDS) if number not in used)
        self.broker.last_id = self.broker.last_id % PACKET_IDS + 1
        return self.broker.last_id

    def send(self, message: Message) -> None:
        if message.released:
            self.down.append(("PUBREL", message.packet_id, b"", False, message.serial))
            return
        looks = blake2b(bytes([message.payload]), digest_size=8).digest()
        self.down.append((f"PUBLISH{message.qos}", message.packet_id, looks, message.sent, message.serial))
        message.sent = True

    def broker_reads(self) -> None:
        for _ in range(self.chance.randint(1, 5)):
            if self.up:
                self.broker_handles(*self.up.pop(0))
        self.broker_sends()

    def broker_handles(self, kind: str, packet_id: int) -> None:
        if kind == "PINGREQ":
            self.down.append(("PINGRESP", 0, b"", False, 0))
            return
        for message in self.broker.inflight:
            if message.packet_id == packet_id:
                if kind == "PUBREC":
                    message.released = True
                    self.send(message)
                elif (kind == "PUBACK") == (message.qos == 1):
                    self.broker.inflight.remove(message)
                return

    def broker_saves(self) -> None:
        self.saved = copy.deepcopy(self.broker)

    def broker_is_killed(self) -> None:
        """It comes back with an old state."""
        self.cut()
        self.dropped |= self.broker.messages() - self.saved.messages()
        self.broker = copy.deepcopy(self.saved)
        self.regressed = True

    # the gateway

    def gateway_reads(self) -> None:
        count = self.chance.randint(1, 6)
        readings: list[tuple[int, bool]] = []
        known: list[int] = []
        answers: list[tuple[str, int]] = []
        read, self.down = self.down[:count], self.down[count:]
        for kind, packet_id, looks, duplicate, serial in read:
            if kind == "PINGRESP":
                self.deliveries.ponged()
            elif kind == "PUBREL":
                self.deliveries.release(packet_id)
                answers.append(("PUBCOMP", packet_id))
            else:
                judge = self.deliveries.receive if kind == "PUBLISH1" else self.deliveries.receive_exactly_once
                judgement = judge(packet_id, looks, duplicate=duplicate)
                answers.append(("PUBACK" if kind == "PUBLISH1" else "PUBREC", packet_id))
                if judgement is Judgement.STORED:
                    known.append(serial)
                else:
                    readings.append((serial, judgement is Judgement.DOUBTFUL))
        if answers:
            number, marks = self.deliveries.batch()
            self.taken.append(Batch(number, readings, known, marks, answers))

    def gateway_commits(self) -> None:
        self.commit(self.chance.randint(1, 3))

    def commit(self, count: int) -> None:
        for batch in self.taken[:count]:
            self.stored += batch.readings
            self.at_risk -= {*batch.known, *(serial for serial, _ in batch.readings)}
            keep(self.disk, batch.marks)
            self.untold.append(batch)
        del self.taken[:count]

    def gateway_acknowledges(self) -> None:
        for batch in self.untold:
            self.deliveries.stored(batch.number)
            if self.online:
                self.deliveries.acknowledged(batch.number)
                self.up += batch.answers
        self.untold.clear()
        if self.online and self.deliveries.wants_ping:
            self.deliveries.pinged()
            self.up.append(("PINGREQ", 0))

    def connect(self) -> None:
        if self.online:
            return
        self.settle()
        keep(self.disk, self.deliveries.forget_marks())
        trusted = self.deliveries.counts_up
        self.deliveries.connecting()
        if self.chance.random() < 0.1:
            # CONNACK refuses the connection.
            keep(self.disk, self.deliveries.connection_refused())
            return
        self.online = True
        standing = {serial for serial, _ in self.stored}
        self.at_risk = {message.serial for message in self.broker.inflight} & standing
        if not trusted:
            self.excused |= self.at_risk
        for message in self.broker.inflight:
            self.send(message)
        self.broker_sends()
        if self.chance.random() < 0.1:
            # The connection is lost before CONNACK comes.
            self.cut()
            return
        self.deliveries.connected(session_present=self.present)
        if not self.present:
            self.present = True
            number, marks = self.deliveries.batch()
            self.taken.append(Batch(number, [], [], marks, []))

    def settle(self) -> None:
        """Decide all batches that were taken, before CONNECT is sent."""
        self.commit(len(self.taken))
        self.gateway_acknowledges()

    def cut(self) -> None:
        self.down.clear()
        self.up.clear()
        self.online = False
        self.settle()
        self.excused |= self.at_risk

    def gateway_is_killed(self) -> None:
        """Its last bytes may still arrive (if `broker_reads` came before), or not."""
        self.down.clear()
        self.up.clear()
        self.taken.clear()
        self.untold.clear()
        self.online = False
        self.excused |= self.at_risk
        self.deliveries = Deliveries(PREFIX, dict(self.disk))

    # the end

    def drain(self) -> None:
        """All goes well from here on, until the broker has nothing left."""
        for _ in range(10_000):
            self.connect()
            if not self.broker.messages() and not self.up and not self.down and not self.taken and not self.untold:
                break
            self.gateway_reads()
            self.settle()
            self.broker_reads()
        assert not self.broker.messages()
        standing = {serial for serial, _ in self.stored}
        assert set(range(1, self.serial + 1)) - self.dropped <= standing, "lost"
        self.check()

    def check(self) -> None:
        if self.regressed:
            return
        seen: set[int] = set()
        for serial, redelivered in self.stored:
            if serial in seen:
                assert redelivered, f"{serial} stands twice, and nothing says so"
                assert serial not in self.exact, f"{serial} came by QoS 2 and stands twice"
                assert serial in self.excused, f"{serial} stands twice"
            seen.add(serial)


@pytest.fixture(scope="module")
def trust_soon() -> Iterator[None]:
    """A few identifiers make the model's brokers trusted, as a hundred do in earnest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.site_broker.deliveries.FRESH_IDS_MIN", 3)
        patch.setattr("gateway.site_broker.deliveries.UNCONFIRMED_MAX", 3)
        yield


@pytest.mark.slow
@pytest.mark.campaign(seconds=3)
@pytest.mark.usefixtures("trust_soon")
@pytest.mark.parametrize("allocate", ["count-up", "lowest-free"])
@settings(max_examples=size(50, 150))
@given(seed=st.integers(0, 2**32), window=st.integers(1, 6), last_id=st.sampled_from([0, 40_000, PACKET_IDS - 3]))
def test_nothing_is_lost_and_nothing_stands_twice_without_need(
    allocate: str, seed: int, window: int, last_id: int
) -> None:
    """Twice: only where the broker was not known to count up, or where two connections were lost in succession."""
    model = Model(random.Random(seed), allocate, window, last_id)  # noqa: S311 - repeatable
    model.run(300)
    model.drain()


@pytest.mark.campaign(seconds=3)
@pytest.mark.usefixtures("trust_soon")
@settings(max_examples=size(100, 300))
@given(seed=st.integers(0, 2**32), window=st.integers(1, 6))
def test_nothing_that_a_killed_broker_still_has_is_lost(seed: int, window: int) -> None:
    """Equal readings throughout, so that the identifiers which it gives again are all that tells them apart."""
    chance = random.Random(seed)  # noqa: S311 - repeatable
    model = Model(chance, "count-up", window, 0, kinds=((0, 1),))
    for _ in range(6):
        model.run(chance.randint(5, 50))
        model.broker_is_killed()
    model.drain()
