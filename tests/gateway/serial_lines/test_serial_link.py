"""The gateway's side of a serial line: acknowledged means on disk, and every loss is known, whatever gets lost."""

import zlib
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from gateway.clock.sensor_clocks import DeviceClocks
from gateway.reading import WINDOW_SEQUENCES, Reading, Recalled
from gateway.serial_lines.frame_link import (
    BITMAP_BITS,
    HELLO_REQUEST_INTERVAL_US,
    PROBE_FIRST_INTERVAL_US,
    PROBES_FIRST,
    SEQUENCE_MAX,
    SILENT_OPEN_US,
    WIRE_SHARE,
    WIRE_TRIPS,
    HelloRefused,
    Identified,
    LinkEvent,
    Lost,
    Received,
    SerialLink,
)
from gateway.serial_lines.frames import (
    Ack,
    Data,
    Frame,
    FrameDecoder,
    Hello,
    HelloRequest,
    Probe,
    Reply,
    cobs_encode,
    encode_frame,
)
from gateway.settings import SerialSettings
from tests.support.sizes import size

HELLO = Hello(
    boot=7,
    incarnation=0x1A2B3C4D,
    reset_cause=1,
    oldest=0,
    next=0,
    device="attic",
    firmware="1.0",
    streams=("thermo", "door"),
)
RUN = HELLO.run
START_US = 1_000_000
NONCE = 0xC0FFEE


def new_link() -> SerialLink:
    return SerialLink("/dev/ttyUSB0", SerialSettings(), START_US)


def send(link: SerialLink, *frames: Frame, now_us: int = START_US) -> list[LinkEvent]:
    return link.receive(b"".join(encode_frame(frame) for frame in frames), now_us)


def answers(link: SerialLink, now_us: int = START_US) -> list[Frame]:
    return FrameDecoder().feed(link.data_to_send(now_us, NONCE))


def known_link(hello: Hello = HELLO) -> SerialLink:
    link = new_link()
    (event,) = send(link, hello)
    assert isinstance(event, Identified)
    assert answers(link) == [Probe(NONCE), Ack(hello.run, hello.oldest, 0)]
    assert link.recall(event, Recalled(frozenset(), hello.oldest)) == []
    return link


def data(sequence: int, oldest: int = 0, *, boot: int = 7, stream: int = 0) -> Data:
    return Data(boot ^ HELLO.incarnation, sequence, oldest, 1000 + sequence % 1000, stream, b'{"t":%d}' % sequence)


def only(events: list[LinkEvent]) -> Received:
    (event,) = events
    assert isinstance(event, Received)
    return event


@pytest.fixture
def link() -> SerialLink:
    return known_link()


def test_a_reading_is_acknowledged_after_its_commit_and_not_before() -> None:
    link = new_link()
    hello = Identified("attic", "7-1a2b3c4d", "1.0", 1, ("thermo", "door"), HELLO.oldest, HELLO.next)
    assert send(link, HELLO) == [hello]
    assert answers(link) == [Probe(NONCE), Ack(RUN, 0, 0)]

    received = only(send(link, data(0), data(1, stream=1), now_us=START_US + 5))
    first, second = received.readings
    assert first.topic == "device/attic/thermo"
    assert second.topic == "device/attic/door"
    assert first.subject == "/dev/ttyUSB0"
    assert first.datum.payload == b'{"t":0}'
    assert (first.datum.device_boot, first.datum.device_sequence, first.datum.tick_ms) == ("7-1a2b3c4d", 0, 1000)
    assert (first.datum.received_us, first.datum.event_us) == (START_US + 5, None)
    assert answers(link) == []

    assert link.stored(received) == []
    assert answers(link) == [Ack(RUN, 2, 0)]
    assert answers(link) == []


def test_noise_around_a_frame_and_a_zero_that_was_lost_cost_no_reading(link: SerialLink) -> None:
    stream = b"ets Jan 8" + encode_frame(data(0))[:-1] + encode_frame(data(1))[:-1] + b"\xff" + encode_frame(data(2))
    received = only(link.receive(stream, START_US))
    assert [reading.datum.payload for reading in received.readings] == [b'{"t":0}', b'{"t":1}', b'{"t":2}']
    assert link.faults == {"noise": 1}


def test_what_arrives_out_of_order_is_acknowledged_by_the_bitmap(link: SerialLink) -> None:
    link.stored(only(send(link, data(1), data(3))))
    assert answers(link) == [Ack(RUN, 0, 0b101)]
    link.stored(only(send(link, data(0))))
    assert answers(link) == [Ack(RUN, 2, 0b1)]
    link.stored(only(send(link, data(2))))
    assert answers(link) == [Ack(RUN, 4, 0)]


def test_what_is_on_disk_is_acknowledged_again_and_not_stored_again(link: SerialLink) -> None:
    link.stored(only(send(link, data(0), data(2))))
    answers(link)
    assert send(link, data(0), data(2)) == []
    assert answers(link) == [Ack(RUN, 1, 0b1)]


def test_what_is_being_committed_is_not_handed_over_twice(link: SerialLink) -> None:
    received = only(send(link, data(0), data(0)))
    assert received.sequences == (0,)
    assert send(link, data(0)) == []
    assert answers(link) == []
    link.stored(received)
    assert answers(link) == [Ack(RUN, 1, 0)]


def test_a_refused_commit_is_not_acknowledged_and_the_sensors_repetition_is_taken(link: SerialLink) -> None:
    assert link.not_stored(only(send(link, data(0)))) == []
    assert answers(link) == []
    link.stored(only(send(link, data(0))))
    assert answers(link) == [Ack(RUN, 1, 0)]


def test_data_of_another_boot_is_not_stored_but_asked_about_once_for_a_burst() -> None:
    link = new_link()
    assert send(link, data(0), data(1)) == []
    assert answers(link) == [HelloRequest()]
    send(link, data(2))
    assert answers(link) == []
    later_us = START_US + HELLO_REQUEST_INTERVAL_US
    send(link, data(3), now_us=later_us)
    assert answers(link, later_us) == [HelloRequest()]

    link = known_link()
    assert send(link, data(0, boot=8)) == []
    assert answers(link) == [HelloRequest()]


def test_a_restarted_sensor_is_a_new_run_and_the_old_ones_commit_acknowledges_nothing(link: SerialLink) -> None:
    old = only(send(link, data(0)))
    (identified,) = send(link, replace(HELLO, boot=8))
    assert isinstance(identified, Identified)
    assert identified.boot == "8-1a2b3c4d"
    assert answers(link) == [Probe(NONCE), Ack(8 ^ HELLO.incarnation, 0, 0)]
    assert link.stored(old) == []
    assert answers(link) == []


def test_data_before_a_hello_in_the_same_bytes_belongs_to_the_run_before(link: SerialLink) -> None:
    first, identified, second = send(link, data(0), replace(HELLO, boot=8), data(0, boot=8))
    assert isinstance(first, Received)
    assert isinstance(identified, Identified)
    assert isinstance(second, Received)
    assert first.readings[0].datum.device_boot == "7-1a2b3c4d"
    assert second.readings[0].datum.device_boot == "8-1a2b3c4d"
    link.stored(first)
    link.stored(second)
    assert Ack(8 ^ HELLO.incarnation, 1, 0) in answers(link)


def test_a_hello_of_the_same_run_keeps_what_is_known(link: SerialLink) -> None:
    link.stored(only(send(link, data(0))))
    answers(link)
    assert send(link, replace(HELLO, oldest=1, next=1)) == []
    assert answers(link) == [Ack(RUN, 1, 0)]


def test_a_boot_counter_that_failed_does_not_make_new_samples_pass_for_stored_ones(link: SerialLink) -> None:
    link.stored(only(send(link, data(0), data(1))))
    (identified,) = send(link, HELLO)
    assert isinstance(identified, Identified)
    only(send(link, data(0)))


def test_after_a_restart_of_the_gateway_it_begins_at_what_the_sensor_holds() -> None:
    link = known_link(replace(HELLO, oldest=41, next=45))
    link.stored(only(send(link, data(41, 41))))
    assert answers(link) == [Ack(RUN, 42, 0)]


def identified(hello: Hello) -> tuple[SerialLink, Identified]:
    link = new_link()
    (event,) = send(link, hello)
    assert isinstance(event, Identified)
    answers(link)
    return link, event


def test_what_the_ring_dropped_while_nobody_listened_is_lost() -> None:
    link, event = identified(replace(HELLO, oldest=70, next=134))
    # Of an earlier link 40 was the last to be stored, so that 41 to 69 were dropped meanwhile.
    assert link.recall(event, Recalled(frozenset({38, 39, 40}), 38)) == [Lost("attic", "7-1a2b3c4d", 41, 69)]
    link.stored(only(send(link, data(70, 70))))
    assert answers(link) == [Ack(RUN, 71, 0)]


def test_what_an_earlier_link_stored_is_known_exactly() -> None:
    link, event = identified(replace(HELLO, oldest=41, next=50))
    assert link.recall(event, Recalled(frozenset({38, 39, 40, 42, 43}), 38)) == []
    link.stored(only(send(link, data(41, 41))))
    assert answers(link) == [Ack(RUN, 42, 0)]
    # 42 and 43 it let go when an earlier link acknowledged them. 44, however near, nobody has stored.
    *losses, received = send(link, data(46, 45))
    assert losses == [Lost("attic", "7-1a2b3c4d", 44, 44)]
    link.stored(only([received]))
    assert answers(link) == [Ack(RUN, 45, 0b1)]


def test_recalled_sequences_do_not_hide_new_samples_of_a_failed_boot_counter() -> None:
    link, event = identified(replace(HELLO, oldest=0, next=2))
    assert link.recall(event, Recalled(frozenset(range(20)), 0)) == []
    assert only(send(link, data(0), data(1))).sequences == (0, 1)
    assert answers(link) == [], "not before they are stored"


def test_drops_before_the_recall_are_reported_after_it_in_order() -> None:
    link, event = identified(replace(HELLO, oldest=41, next=105))
    first, second = only(send(link, data(50, 45))), only(send(link, data(60, 60)))
    link.stored(first)
    link.stored(second)
    assert answers(link) == [Ack(RUN, 61, 0)], "no answer waits for it"
    assert link.recall(event, Recalled(frozenset({30, 42, 43}), 30)) == [
        Lost("attic", "7-1a2b3c4d", 31, 40),
        Lost("attic", "7-1a2b3c4d", 41, 41),
        Lost("attic", "7-1a2b3c4d", 44, 49),
        Lost("attic", "7-1a2b3c4d", 51, 59),
    ]
    assert send(link, data(62, 62))[0] == Lost("attic", "7-1a2b3c4d", 61, 61)


def test_a_sample_that_was_damaged_before_the_gateway_died_is_lost_once_the_ring_drops_it() -> None:
    link, event = identified(replace(HELLO, oldest=40, next=104))
    stored = frozenset({*range(10), *range(11, 16)})
    assert link.recall(event, Recalled(stored, 0)) == [
        Lost("attic", "7-1a2b3c4d", 10, 10),
        Lost("attic", "7-1a2b3c4d", 16, 39),
    ]


@pytest.mark.parametrize("stored", [frozenset(range(20)), frozenset()])
def test_losses_reported_before_a_restart_are_not_reported_again(stored: frozenset[int]) -> None:
    link, event = identified(replace(HELLO, oldest=35, next=99))
    assert link.recall(event, Recalled(stored, 30)) == [Lost("attic", "7-1a2b3c4d", 30, 34)]


def test_what_nobody_knows_after_a_crash_is_not_surely_lost_until_new_samples_come() -> None:
    link, event = identified(replace(HELLO, oldest=70, next=134))
    link.stored(only(send(link, data(72, 70))))
    assert link.recall(event, Recalled(frozenset({38, 39, 40, 50}), 38, 200)) == [
        Lost("attic", "7-1a2b3c4d", 41, 49, is_sure=False),
        Lost("attic", "7-1a2b3c4d", 51, 69, is_sure=False),
    ]
    # An earlier link may have acknowledged 73, and the sensor let it go.
    *losses, received = send(link, data(74, 74))
    assert losses == [
        Lost("attic", "7-1a2b3c4d", 70, 71, is_sure=False),
        Lost("attic", "7-1a2b3c4d", 73, 73, is_sure=False),
    ]
    link.stored(only([received]))
    # From 134 on it gives its samples to this link first.
    assert send(link, data(150, 140))[:2] == [
        Lost("attic", "7-1a2b3c4d", 75, 133, is_sure=False),
        Lost("attic", "7-1a2b3c4d", 134, 139),
    ]
    link, event = identified(replace(HELLO, oldest=76, next=180))
    # By now the buffer knows all from 134 on.
    assert link.recall(event, Recalled(frozenset({75}), 75, 134)) == []
    assert send(link, data(150, 140))[:2] == [
        Lost("attic", "7-1a2b3c4d", 76, 133, is_sure=False),
        Lost("attic", "7-1a2b3c4d", 134, 139),
    ]


def test_what_windows_have_forgotten_is_not_called_lost() -> None:
    link, event = identified(replace(HELLO, oldest=133, next=140))
    # 6 to 68 were stored, and their places taken.
    assert link.recall(event, Recalled(frozenset({5, *range(70, 133)}), 0)) == [Lost("attic", "7-1a2b3c4d", 69, 69)]


def test_of_a_sequence_that_has_gone_back_nothing_is_known() -> None:
    link, event = identified(replace(HELLO, oldest=2, next=3))
    assert link.recall(event, Recalled(frozenset({1, 4000}), 4000)) == []
    assert send(link, data(4010, 4010))[0] == Lost("attic", "7-1a2b3c4d", 2, 4009)


@pytest.mark.parametrize("told_below", [0, 3])
def test_samples_from_before_the_recall_are_no_other_life_of_the_run(told_below: int) -> None:
    link, event = identified(replace(HELLO, oldest=40, next=41))
    link.stored(only(send(link, data(40, 40), data(41, 40))))
    recalled = Recalled(frozenset({*range(16), 40, 41}), told_below)
    assert link.recall(event, recalled) == [Lost("attic", "7-1a2b3c4d", 16, 39)]


def test_recalling_nothing_says_nothing_of_a_run_that_nobody_knew() -> None:
    link, event = identified(replace(HELLO, oldest=70, next=134))
    assert link.recall(event, Recalled(frozenset(), 70)) == []


def test_a_late_recall_belongs_to_the_run_that_was_asked_for() -> None:
    link, event = identified(replace(HELLO, oldest=5, next=9))
    send(link, replace(HELLO, boot=8, oldest=0, next=3))
    answers(link)
    assert link.recall(event, Recalled(frozenset({2, 3, 4, 5}), 2)) == []
    assert link.recall(event, Recalled(frozenset({2}), 2)) == [Lost("attic", "7-1a2b3c4d", 3, 4)]
    link.stored(only(send(link, data(0, boot=8))))
    assert answers(link) == [Ack(8 ^ HELLO.incarnation, 1, 0)]


def test_what_the_ring_dropped_is_lost_once_and_next_moves_on(link: SerialLink) -> None:
    link.stored(only(send(link, data(0), data(2))))
    *losses, received = send(link, data(6, oldest=5))
    # 2 is on disk, so there are two spans; 5 is still held.
    assert losses == [Lost("attic", "7-1a2b3c4d", 1, 1), Lost("attic", "7-1a2b3c4d", 3, 4)]
    link.stored(only([received]))
    assert answers(link) == [Ack(RUN, 5, 0b1)]
    assert [only(send(link, data(5, oldest=5))).sequences] == [(5,)]


def test_a_dropped_reading_under_commit_is_lost_only_if_the_commit_fails(link: SerialLink) -> None:
    first = only(send(link, data(0)))
    second = only(send(link, data(1, oldest=1)))
    link.stored(second)
    assert answers(link) == [Ack(RUN, 0, 0b1)]
    assert link.not_stored(first) == [Lost("attic", "7-1a2b3c4d", 0, 0)]
    assert send(link, data(1, oldest=1)) == []
    assert answers(link) == [Ack(RUN, 2, 0)]


def test_a_loss_ends_where_something_is_being_committed(link: SerialLink) -> None:
    first = only(send(link, data(1)))
    lost, _ = send(link, data(3, oldest=3))
    assert lost == Lost("attic", "7-1a2b3c4d", 0, 0)
    assert link.stored(first) == [Lost("attic", "7-1a2b3c4d", 2, 2)]
    assert answers(link) == [Ack(RUN, 3, 0)]


def test_a_jump_of_billions_costs_nothing(link: SerialLink) -> None:
    lost, received = send(link, data(SEQUENCE_MAX, oldest=SEQUENCE_MAX))
    assert lost == Lost("attic", "7-1a2b3c4d", 0, SEQUENCE_MAX - 1)
    assert isinstance(received, Received)
    link.stored(received)
    assert answers(link) == [Ack(RUN, SEQUENCE_MAX + 1, 0)]
    assert send(link, data(SEQUENCE_MAX + 1, oldest=SEQUENCE_MAX + 1)) == []
    assert answers(link) == [Ack(RUN, SEQUENCE_MAX + 1, 0)]


def test_a_sequence_that_no_ack_could_name_is_left_to_be_sent_again(link: SerialLink) -> None:
    received = only(send(link, data(BITMAP_BITS), data(BITMAP_BITS + 1)))
    assert received.sequences == (BITMAP_BITS,)
    assert link.faults == {"beyond-window": 1}
    link.stored(received)
    assert answers(link) == [Ack(RUN, 0, 1 << (BITMAP_BITS - 1))]


@pytest.mark.parametrize(
    "hello",
    [
        replace(HELLO, device="at/tic"),
        replace(HELLO, device=""),
        replace(HELLO, device="attic\n"),
        replace(HELLO, streams=("thermo", "#")),
    ],
)
def test_a_bad_name_is_refused_counted_and_told_once(hello: Hello, link: SerialLink) -> None:
    (refused,) = send(link, hello)
    assert isinstance(refused, HelloRefused)
    assert "1 to 63 letters" in refused.reason
    assert send(link, hello) == []
    assert link.faults == {"refused-hello": 2}
    # Its DATA is neither stored as the former device's nor asked about.
    assert send(link, data(0)) == []
    assert answers(link) == []


def test_a_stream_that_hello_did_not_name_goes_by_its_number(link: SerialLink) -> None:
    assert only(send(link, data(0, stream=2))).readings[0].topic == "device/attic/stream-2"


def test_a_silent_line_is_asked_once_in_a_while() -> None:
    link = new_link()
    assert answers(link, START_US + SILENT_OPEN_US - 1) == []
    due_us = link.due_us
    assert due_us == START_US + SILENT_OPEN_US
    # However late it is asked (the machine may have been suspended), it catches up by one request.
    late_us = due_us + 100_000_000
    assert answers(link, late_us) == [HelloRequest()]
    assert link.due_us == late_us + 10_000_000


def test_probes_come_quickly_after_hello_and_then_at_the_interval() -> None:
    link = new_link()
    send(link, HELLO)
    times_us = []
    for _ in range(PROBES_FIRST + 2):
        times_us.append(link.due_us)
        assert Probe(NONCE) in answers(link, link.due_us)
    gaps_us = [later - earlier for earlier, later in pairwise(times_us)]
    assert gaps_us == [PROBE_FIRST_INTERVAL_US] * (PROBES_FIRST - 1) + [10_000_000] * 2


def test_a_reply_gives_readings_their_time(link: SerialLink) -> None:
    # The sensor's tick 900.000 lies between 1.000 s and 1.008 s: 104 ms later it says 1004.
    assert send(link, Reply(NONCE, 900, 0), now_us=START_US + 8_000) == []
    (reading,) = only(send(link, data(4), now_us=START_US + 150_000)).readings
    assert reading.datum.event_us is not None
    assert abs(reading.datum.event_us - (START_US + 4_000 + 104_500)) <= 20
    assert 4_000 + 500 <= reading.datum.event_error_us <= 4_000 + 500 + 1_200


def after_slow_trips(link: SerialLink, trips: int) -> Reading:
    """A reading that comes after `trips` round trips of 8 ms."""
    for _ in range(trips):
        due_us = link.due_us
        assert answers(link, due_us) == [Probe(NONCE)]
        tick_us = 900_000 + due_us - START_US
        send(link, Reply(NONCE, tick_us // 1000, tick_us % 1000), now_us=due_us + 8_000)
    tick_ms = 900 + (due_us - START_US) // 1000
    (reading,) = only(send(link, replace(data(4), tick_ms=tick_ms), now_us=due_us + 9_000)).readings
    return reading


def test_round_trips_that_take_what_bytes_take_on_a_wire_show_that_it_is_one(link: SerialLink) -> None:
    send(link, Reply(NONCE, 900, 0), now_us=START_US + 8_000)
    reading = after_slow_trips(link, WIRE_TRIPS)
    assert reading.datum.event_us is not None
    bits = 10 / 38_400 * 1e6 * WIRE_SHARE
    out_us, back_us = bits * len(encode_frame(Probe(NONCE))), bits * len(encode_frame(Reply(NONCE, 900, 0)))
    assert 2_500 < out_us < back_us < 5_000
    half_us = (8_000 - out_us - back_us) / 2
    assert half_us + 500 <= reading.datum.event_error_us <= half_us + 500 + 1_200


def test_a_port_that_is_no_wire_takes_no_time_for_its_bytes(link: SerialLink) -> None:
    send(link, Reply(NONCE, 900, 0), now_us=START_US + 2_000)
    (reading,) = only(send(link, data(4), now_us=START_US + 150_000)).readings
    assert reading.datum.event_us is not None
    assert abs(reading.datum.event_us - (START_US + 1_000 + 104_500)) <= 20


def test_slow_round_trips_show_no_wire_when_nothing_is_known_of_it(link: SerialLink) -> None:
    """A busy machine, and a board that is a USB device itself: it may have read its tick at either end of each."""
    link.claim_no_wire()
    send(link, Reply(NONCE, 900, 0), now_us=START_US + 8_000)
    reading = after_slow_trips(link, 2 * WIRE_TRIPS)
    assert reading.datum.event_us is not None
    assert reading.datum.event_error_us >= 4_000 + 500


def test_a_fitted_time_is_never_after_the_receipt(link: SerialLink) -> None:
    send(link, Reply(NONCE, 900, 0), now_us=START_US + 100_000)
    (reading,) = only(send(link, data(0), now_us=START_US + 102_000)).readings
    assert reading.datum.event_us is not None
    assert reading.datum.event_us + reading.datum.event_error_us <= START_US + 102_000 + 2


def test_a_reply_to_no_probe_of_ours_is_ignored(link: SerialLink) -> None:
    send(link, Reply(NONCE + 1, 900, 0), Reply(NONCE, 900, 0), Reply(NONCE, 500, 0))
    assert link.faults == {"unexpected-reply": 2}
    assert only(send(link, data(0), now_us=START_US + 600_000)).readings[0].datum.event_us is not None


def test_a_reply_of_the_run_before_says_nothing_of_the_new_ones_clock(link: SerialLink) -> None:
    send(link, replace(HELLO, boot=8), Reply(NONCE, 900, 0))
    assert link.faults == {"unexpected-reply": 1}


def test_a_tick_that_jumped_is_asked_about(link: SerialLink) -> None:
    send(link, Reply(NONCE, 900_000, 0), now_us=START_US + 8_000)
    due_us = link.due_us
    assert answers(link, due_us) == [Probe(NONCE)]
    send(link, Reply(NONCE, 50, 0), now_us=due_us + 8_000)
    assert answers(link, due_us + 8_000) == [Probe(NONCE), HelloRequest()]


def test_a_sensor_whose_tick_alone_began_anew_is_asked_about_and_gets_no_time_until_it_answers(
    link: SerialLink,
) -> None:
    send(link, Reply(NONCE, 900_000, 0), now_us=START_US + 8_000)
    first, second = (
        only(send(link, replace(data(sequence), tick_ms=tick_ms), now_us=START_US + 20_000)).readings[0]
        for sequence, tick_ms in ((0, 900_005), (1, 50))
    )
    assert first.datum.event_us is not None
    assert second.datum.event_us is None
    assert answers(link, START_US + 20_000) == [Probe(NONCE), HelloRequest()]


def test_our_own_frames_coming_back_are_ignored(link: SerialLink) -> None:
    assert send(link, Ack(RUN, 100, 0), Probe(1), HelloRequest()) == []
    assert link.faults == {"gateway-frame": 3}
    assert answers(link) == []


@given(st.lists(st.binary(max_size=300)))
def test_garbage_gives_no_event_and_no_answer(pieces: list[bytes]) -> None:
    link = known_link()
    for piece in pieces:
        assert link.receive(piece, START_US) == []
    assert answers(link) == []
    # The zero ends the garbage.
    only(link.receive(b"\0" + encode_frame(data(0)), START_US))


FRAME_LIKE = st.builds(
    Data,
    st.sampled_from([7, 8]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.just(0),
    st.just(0),
    st.just(b""),
) | st.builds(
    Hello,
    st.sampled_from([7, 8]),
    st.just(1),
    st.just(0),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["attic", "a/b"]),
    st.just(""),
    st.just(()),
)


@given(st.lists(FRAME_LIKE | st.booleans(), max_size=60))
def test_a_sensor_that_says_anything_at_all_neither_raises_nor_fills_memory(steps: list[Frame | bool]) -> None:
    link = known_link()
    committing: deque[Received] = deque()
    for step in steps:
        if isinstance(step, bool):
            if committing:
                (link.stored if step else link.not_stored)(committing.popleft())
        else:
            committing.extend(event for event in send(link, step) if isinstance(event, Received))
        answers(link)
        if link._run is not None:
            assert len(link._run._durable) + len(link._run.committing) <= BITMAP_BITS + 1


class ModelSensor:
    """A sensor by docs/frames.md, with a ring of 6 and a window of 4. It checks each ACK's promise."""

    def __init__(self, disk: set[tuple[int, int]]) -> None:
        self.disk = disk
        self.boot = 0
        self.reset()

    def reset(self) -> None:
        self.boot += 1
        self.next = 0
        self.held: list[int] = []
        self.introduced = False

    @property
    def oldest(self) -> int:
        return self.held[0] if self.held else self.next

    def sample(self) -> None:
        self.held = [*self.held, self.next][-6:]
        self.next += 1

    def frames(self) -> list[Frame]:
        if not self.introduced:
            return [replace(HELLO, boot=self.boot, oldest=self.oldest, next=self.next)]
        return [data(s, self.oldest, boot=self.boot) for s in self.held if s < self.oldest + 4]

    def take(self, frame: Frame) -> None:
        if isinstance(frame, HelloRequest):
            self.introduced = False
        if not isinstance(frame, Ack) or frame.run != self.boot ^ HELLO.incarnation:
            return
        self.introduced = True
        named = {frame.next + 1 + bit for bit in range(32) if frame.bitmap >> bit & 1}
        acknowledged = {s for s in self.held if s < frame.next or s in named}
        for sequence in acknowledged:
            assert (self.boot, sequence) in self.disk
        self.held = [s for s in self.held if s not in acknowledged]


class LossyLine(RuleBasedStateMachine):
    """A sensor and a gateway over a line that loses frames, with commits that fail and both ends restarting."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: set[tuple[int, int]] = set()
        """Samples on disk or in Kafka."""
        self.lost: set[tuple[int, int]] = set()
        self.perhaps_lost: set[tuple[int, int]] = set()
        self.forgotten: set[tuple[int, int]] = set()
        """Samples that only Kafka has, and no buffer knows."""
        self.known_from: dict[int, int] = {}
        self.first: dict[int, int] = {}
        """By boot: the first sample that this gateway may have had."""
        self.has_crashed = False
        self.sensor = ModelSensor(self.disk)
        self.link = new_link()
        self.committing: deque[Received] = deque()
        self.recalls: deque[Identified] = deque()
        self.now_us = START_US

    @rule(count=st.integers(1, 3))
    def sample(self, count: int) -> None:
        for _ in range(count):
            self.sensor.sample()

    @rule(lost_up=st.sets(st.integers(0, 3)), lost_down=st.sets(st.integers(0, 2)))
    def exchange(self, lost_up: set[int], lost_down: set[int]) -> None:
        self.now_us += HELLO_REQUEST_INTERVAL_US
        for index, frame in enumerate(self.sensor.frames()):
            if index not in lost_up:
                self.note(send(self.link, frame, now_us=self.now_us))
        for index, frame in enumerate(answers(self.link, self.now_us)):
            if index not in lost_down:
                self.sensor.take(frame)

    @rule(succeeds=st.booleans())
    def commit(self, *, succeeds: bool) -> None:
        if self.committing:
            received = self.committing.popleft()
            if succeeds:
                self.disk |= numbered(received)
            self.note((self.link.stored if succeeds else self.link.not_stored)(received))

    @rule()
    def recall(self) -> None:
        """The buffer answers, sooner or later: from its windows, and how far losses were told."""
        if self.recalls:
            identified = self.recalls.popleft()
            boot = int(identified.boot.split("-")[0])
            stored = {sequence for of_boot, sequence in self.disk - self.forgotten if of_boot == boot}
            told = {sequence for of_boot, sequence in self.lost if of_boot == boot}
            window = frozenset(sequence for sequence in stored if sequence > max(stored) - WINDOW_SEQUENCES)
            self.known_from.setdefault(boot, identified.next if self.has_crashed else 0)
            self.first.setdefault(boot, min(window, default=identified.oldest))
            told_below = max(told, default=self.first[boot] - 1) + 1
            self.note(self.link.recall(identified, Recalled(window, told_below, self.known_from[boot])))

    @rule()
    def restart_sensor(self) -> None:
        self.sensor.reset()

    @rule()
    def restart_gateway(self) -> None:
        self.committing.clear()
        self.recalls.clear()
        self.link = new_link()

    @rule(count=st.integers(0, 20))
    def crash_gateway(self, count: int) -> None:
        """The buffer forgets the newest of its samples. Kafka has them."""
        self.forgotten |= set(sorted(self.disk)[len(self.disk) - min(count, len(self.disk)) :])
        self.known_from.clear()
        self.has_crashed = True
        self.restart_gateway()

    def note(self, events: list[LinkEvent]) -> None:
        for event in events:
            if isinstance(event, Lost):
                boot = int(event.boot.split("-")[0])
                span = {(boot, sequence) for sequence in range(event.first, event.last + 1)}
                assert not span & self.lost
                assert not span & (self.disk if event.is_sure else self.disk - self.forgotten)
                assert boot != self.sensor.boot or event.last < self.sensor.oldest
                if event.is_sure:
                    self.lost |= span
                else:
                    self.perhaps_lost |= span
            if isinstance(event, Identified):
                self.recalls.append(event)
            if isinstance(event, Received):
                assert not any(numbered(event) & numbered(other) for other in self.committing)
                self.committing.append(event)

    def teardown(self) -> None:
        """Line and disk are well again: after a few turns every sample of this run is accounted for."""
        # Something to say, so that a gateway that has just started need not wait to ask a silent line.
        self.sensor.sample()
        for _ in range(10):
            while self.committing:
                self.commit(succeeds=True)
            self.exchange(set(), set())
        while self.recalls:
            self.recall()
        assert self.sensor.held == []
        settled = self.disk | self.lost | self.perhaps_lost
        accounted = {sequence for boot, sequence in settled if boot == self.sensor.boot}
        # Nobody can tell samples that the ring dropped before this run was known from samples that others have. After
        # a crash of the gateway, Kafka is one of these others.
        known = min(sequence for boot, sequence in settled - self.forgotten if boot == self.sensor.boot)
        assert accounted - set(range(known)) == set(range(known, self.sensor.next))
        assert not self.disk & self.lost


def numbered(received: Received) -> set[tuple[int, int]]:
    return {(received.run.hello.boot, sequence) for sequence in received.sequences}


TestLossyLine = pytest.mark.slow(pytest.mark.campaign(seconds=5)(LossyLine.TestCase))
TestLossyLine.settings = settings(max_examples=size(50, 150), stateful_step_count=40)


def test_a_frame_of_another_version_is_counted() -> None:
    link = new_link()
    content = b"\x01\x02"
    link.receive(cobs_encode(content + zlib.crc32(content).to_bytes(4, "little")) + b"\0", START_US)
    assert link.faults == {"unknown-version": 1}


def test_whether_a_sensor_is_heard_is_told_by_its_own_frames_and_by_probes_without_an_answer(link: SerialLink) -> None:
    assert link.heard_us == START_US
    now_us = START_US
    for number in range(1, 4):
        now_us = link.due_us
        assert Probe(NONCE) in answers(link, now_us)
        # Its own frames come back where receive and transmit are shorted.
        send(link, Probe(NONCE), now_us=now_us)
        assert (link.heard_us, link.probes_unanswered) == (START_US, number + 1)
    send(link, Reply(NONCE, 0, 500), now_us=now_us + 1)
    assert (link.heard_us, link.probes_unanswered) == (now_us + 1, 0)


def test_why_a_sensor_is_refused_is_known_until_it_has_a_name() -> None:
    link = new_link()
    assert link.refusal is None
    send(link, replace(HELLO, device="a b/c"))
    assert str(link.refusal).startswith("it calls itself 'a b/c', which is no device name (")
    send(link, replace(HELLO, streams=("x y",)))
    assert str(link.refusal).startswith("it calls a stream 'x y', which is no stream name (")
    send(link, HELLO)
    assert link.refusal is None


def test_the_clock_of_a_sensor_that_is_here_stays_whoever_else_comes() -> None:
    clocks = DeviceClocks(runs_max=3)
    link = SerialLink("/dev/ttyUSB0", SerialSettings(), START_US, clocks)
    send(link, HELLO)
    for boot in range(5):
        now_us = link.due_us
        assert Probe(NONCE) in answers(link, now_us)
        send(link, Reply(NONCE, now_us // 1000, 0), now_us=now_us + 20_000)
        clocks.of("elsewhere", str(boot))
    clock = clocks.find("attic", "7-1a2b3c4d")
    assert clock is not None
    assert clock.fit.observed_us is not None
    assert clock.fit.observed_us > now_us
