"""Each thing that may be wrong becomes a condition, with words on what to do. Without any, all is well."""

from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.buffer.shares import AboveShare
from gateway.buffer.status import BufferStatus
from gateway.buffer.wear import DAY_S, UsageHour, write_budget
from gateway.clock.report import ClockView
from gateway.health.conditions import Condition, conditions, first_copy, headline
from gateway.health.facts import Facts, Silent
from gateway.host.disk_health import Trouble
from gateway.host.fleet_report import FleetReport
from gateway.host.last_update import Before, LastUpdate
from gateway.settings import (
    BufferSettings,
    Envelope,
    GatewaySettings,
    KafkaSettings,
    ListenerSettings,
    RouteSettings,
    Settings,
)
from gateway.uplink.state import ONE_REPLICA, SLOW, UplinkState

WALL_S = 1_800_000_000.0
UP = UplinkState(up=True, since=WALL_S - 600)
DOWN = UplinkState(error="nothing listens at kafka.example:9092", since=WALL_S - 600)
FOUND = BufferStatus("id", True, 0, 0, None, None, False, 1, 0, {}, {}, (), ())
WELL = Facts(
    settings=Settings(
        GatewaySettings("barn-1"),
        KafkaSettings(("kafka.example:9092",)),
        BufferSettings(Path("/nowhere"), bytes_max=1_000_000_000),
        ListenerSettings(anonymous=True),
    ),
    boottime_us=10**10,
    wall_s=WALL_S,
    up_s=3_600,
    rows=3,
    bytes_used=1_000_000,
    uplink=UP,
    buffer_status=FOUND,
    room_bytes=500_000_000,
    hours_until_full=72.0,
    disk_free_bytes=10**9,
    counts={"readings": 100},
    devices=3,
    heard=3,
)

EVENTS_REFUSED = dataclass_replace(UP, refused_topics={"structured-device-a": "it does not exist"})
REFUSED = {"user": "attic", "address": "192.0.2.7", "why": "the password is wrong; rotate it", "ago_s": 30.0}


def with_route(kafka: str, envelope: Envelope) -> Settings:
    return replace(WELL.settings, routes=(RouteSettings("device/{device}/{stream}", kafka, envelope=envelope),))


def only(facts: Facts) -> Condition:
    (alarm,) = conditions(facts)
    return alarm


def test_all_is_well_in_a_sentence() -> None:
    assert conditions(WELL) == []
    top = headline(WELL, [])
    assert (top.level, top.todo) == ("well", "")
    assert top.words == "All is well: 3 devices are heard, Kafka takes the readings, nothing piles up."
    many = replace(WELL, rows=1_000)
    assert headline(many, []).words.endswith("Kafka takes the readings, 1,000 readings and events are on their way.")
    nobody = replace(WELL, devices=0, heard=0, up_s=30)
    assert "no device has been heard yet" in headline(nobody, conditions(nobody)).words


def test_all_is_well_only_where_nothing_is_to_be_looked_at() -> None:
    found = replace(FOUND, quarantined=2, quarantine_reasons={"no-route": 2})
    facts = replace(WELL, buffer_status=found, missing=(("shed", 20),))
    top = headline(facts, conditions(facts))
    assert (top.level, top.words) == ("note", "Readings reach Kafka; 2 things to look at.")
    assert any(alarm.words == "Readings are missing of shed (≥ 20)." for alarm in conditions(facts))
    # An adapter that may come later is nothing to be looked at.
    waiting = replace(WELL, serial={"awaited": {"all": "no USB adapter is plugged in now; it may come later"}})
    assert headline(waiting, conditions(waiting)).level == "well"


def test_an_update_of_the_image_is_told_until_it_is_good() -> None:
    update = LastUpdate("1", "1.0", "1.1", "b", Before())
    trial = only(replace(WELL, update=update))
    assert (trial.code, trial.level) == ("update-on-trial", "note")
    assert trial.words == "Version 1.1 is on trial; if it is not found good, this box goes back to 1.0."
    assert headline(WELL, [trial]).level == "well", "nothing is to be done"
    back = only(replace(WELL, update=replace(update, result="went-back", reason="its service does not run")))
    assert (back.code, back.level) == ("update-went-back", "warn")
    assert back.words == "Version 1.1 was given up, and 1.0 runs again: its service does not run."
    assert conditions(replace(WELL, update=replace(update, result="good"))) == []


def test_what_became_of_a_fleets_file_is_told() -> None:
    report = FleetReport(7, "", "0123456789abcdef", "good")
    assert conditions(replace(WELL, fleet=report)) == []
    assert conditions(replace(WELL, fleet=replace(report, result="waits", reason="its hours"))) == []
    trial = only(replace(WELL, fleet=replace(report, result="on-trial")))
    assert (trial.code, trial.level) == ("fleet-on-trial", "note")
    back = only(replace(WELL, fleet=replace(report, result="went-back", reason="Kafka is not reached")))
    assert (back.code, back.level) == ("fleet-went-back", "warn")
    assert "given up: Kafka is not reached." in back.words
    stuck = only(replace(WELL, fleet=replace(report, result="going-back", reason="it hung", trouble="dpkg failed")))
    assert stuck.code == "fleet-went-back"
    assert "it hung. The going back has not succeeded yet: dpkg failed." in stuck.words
    refused = only(replace(WELL, fleet=replace(report, result="refused", reason="no way back")))
    assert (refused.code, refused.level) == ("fleet-refused", "warn")
    unread = only(replace(WELL, fleet=replace(report, trouble="the server answers 404")))
    assert unread.code == "fleet-unread"
    assert "the server answers 404." in unread.words


def test_a_stick_that_is_refused_is_told_beside_the_last_update() -> None:
    update = LastUpdate("1", "1.0", "1.1", "b", Before(), "went-back", "its service does not run")
    refused = replace(update, result="refused", reason="a.raucb: it is for toaster")
    alarm = only(replace(WELL, refused_update=refused))
    assert (alarm.code, alarm.level) == ("update-refused", "warn")
    assert alarm.words.endswith("and version 1.0 goes on: a.raucb: it is for toaster.")
    both = conditions(replace(WELL, update=update, refused_update=refused))
    assert sorted(each.code for each in both) == ["update-refused", "update-went-back"]


def test_kafka_that_is_not_reached() -> None:
    alarm = only(replace(WELL, uplink=DOWN, rows=1_234))
    assert alarm.words == "Kafka has not been reached for 10 min: nothing listens at kafka.example:9092."
    assert alarm.means == "1,234 readings and events are safe on this box; its room lasts 3 days more."
    assert "sluice check" in alarm.todo
    top = headline(WELL, [alarm])
    assert (top.level, top.words) == ("warn", alarm.words)


def test_modbus_units_that_cannot_be_read() -> None:
    fault = "holding 0: unit 9 answered instead: is its number right, and is there no other master?"
    units = {
        "meter": {"answers": False, "fault": fault},
        "new": {"answers": False, "fault": None},
        "climate": {"answers": True, "fault": "holding 1: no answer"},
    }
    alarm = only(
        replace(WELL, serial={"ports": {"/dev/ttyUSB0": {"kind": "M-Bus", "units": units, "acknowledges": False}}})
    )
    assert (alarm.level, alarm.words) == ("warn", "1 M-Bus unit on /dev/ttyUSB0 cannot be read: meter.")
    assert alarm.means == f"meter at the last: {fault}"
    assert alarm.todo == "Where there is no answer, check their power, wires, address and baud."


def test_a_devices_file_that_cannot_be_used_says_who_is_out() -> None:
    trouble = {"trouble": "devices.json is damaged"}
    assert only(replace(WELL, logins={**trouble, "kept": True})).means.startswith("Devices log in as before")
    assert only(replace(WELL, logins={**trouble, "kept": False})).means.startswith("None of those that it names")


def test_the_gateways_own_events_are_no_readings_that_are_lost() -> None:
    found = replace(FOUND, losses={"buffer-full": 7, "gateway-events-dropped": 2})
    assert (
        "lost for good (buffer-full), the last" in only(replace(WELL, lost=7, lost_s=60.0, buffer_status=found)).words
    )


def test_a_box_whose_clock_was_set_says_no_time_that_it_does_not_know() -> None:
    alarm = only(replace(WELL, uplink=dataclass_replace(DOWN, since=946_684_800.0)))
    assert alarm.words.startswith("Kafka has not been reached: nothing")


def test_kafka_that_refuses_this_gateway() -> None:
    barred = dataclass_replace(DOWN, error="the log-in was refused", barred=True)
    alarm = only(replace(WELL, uplink=barred))
    assert alarm.words == "Kafka cannot be used for 10 min: the log-in was refused."
    assert "log-in" in alarm.todo


def test_a_gateway_that_has_just_started_is_given_a_moment() -> None:
    fresh = replace(WELL, uplink=UplinkState(), up_s=5)
    assert conditions(fresh) == []
    assert headline(fresh, []).words.endswith("Kafka is being connected to, 3 readings and events wait for it.")
    assert headline(replace(fresh, rows=0), []).words.endswith("Kafka is being connected to, nothing waits.")
    assert "no answer yet" in only(replace(fresh, up_s=60)).words


@pytest.mark.parametrize(
    ("changes", "level", "words", "todo"),
    [
        ({"failing": "disk I/O error"}, "bad", "The disk fails: disk I/O error.", "replace it"),
        (
            {"failing": "disk I/O error", "uplink": dataclass_replace(UP, direct_topics=2)},
            "bad",
            "The disk fails: disk I/O error.",
            "replace it",
        ),
        ({"full": True, "bytes_used": 10**9}, "bad", "The buffer is full (1.0 GB).", "buffer.bytes_max"),
        (
            {"above_share": [AboveShare("attic", 380_000_000, 7)], "above_share_devices": 3},
            "bad",
            "More than their share of the buffer is held by attic (380.0 MB) and 2 more.",
            "sluice devices revoke",
        ),
        ({"bytes_used": 850_000_000}, "warn", "The buffer fills: 85% of its room is used.", "buffer.bytes_max"),
        (
            {"disk_troubles": (Trouble(True, "ext4 has met 3 errors"),)},
            "bad",
            "The disk needs a look: ext4 has met 3 errors.",
            "",
        ),
        (
            {"disk_troubles": (Trouble(False, "mmcblk0 is worn"),)},
            "warn",
            "The disk needs a look: mmcblk0 is worn.",
            "",
        ),
        (
            {"refused": (REFUSED,)},
            "warn",
            "The log-in of attic from 192.0.2.7 was refused 30 s ago: the password is wrong.",
            "Rotate it.",
        ),
        (
            {"refused": (REFUSED | {"user": None, "why": "no name"},)},
            "warn",
            "A sensor's log-in from 192.0.2.7 was refused 30 s ago: no name.",
            "journalctl",
        ),
        ({"logins": {"trouble": "devices.json is no JSON"}}, "warn", "devices.json is no JSON.", ""),
        (
            {"uplink": dataclass_replace(UP, throttled_s=4.2)},
            "warn",
            "A quota of Kafka's holds this gateway back.",
            "producer_byte_rate",
        ),
        ({"settings_change": ""}, "warn", "The settings were changed since", "sudo systemctl restart sluice"),
        ({"lost": 7, "lost_s": 60.0}, "bad", "7 readings are lost for good, the last 1 min ago.", "sluice buffer ls"),
        (
            {"clock": ClockView(synced=False, error_us=None, since_us=10**10 - 300 * 10**6)},
            "warn",
            "This box's clock has not been synced for 5 min.",
            "timedatectl",
        ),
        (
            {
                "clock": ClockView(
                    synced=True, error_us=1, since_us=0, steps=1, stepped_us=10**10, stepped_by_us=-(10**7)
                )
            },
            "warn",
            "Somebody set this box's clock 0 s ago, by -10.0 s, although it was synced.",
            "two time services",
        ),
        (
            {"devices": 0, "heard": 0},
            "warn",
            "No device has been heard since the start, 1 h ago.",
            "sluice devices add",
        ),
        ({"heard": 0}, "warn", "None of the 3 known devices has been heard since the start, 1 h ago.", "sluice check"),
        (
            {"silent": (Silent("goat-7", 720.0, 10.0),)},
            "warn",
            "goat-7 has been silent for 12 min.",
            "Check its power",
        ),
        (
            {"silent": tuple(Silent(f"goat-{number}", 720.0, 10.0) for number in range(5))},
            "warn",
            "5 devices are silent: goat-0 for 12 min, goat-1 for 12 min, goat-2 for 12 min, and 2 more.",
            "Check their power",
        ),
        (
            {"serial": {"gone": {"/dev/ttyUSB0": {"gone_s": 90.0, "devices": ["7"]}}, "missing": ["/dev/ttyUSB0"]}},
            "bad",
            "/dev/ttyUSB0 has been gone for 1 min 30 s.",
            "Plug it in again",
        ),
        ({"serial": {"missing": ["/dev/ttyS9"]}}, "warn", "/dev/ttyS9 is not there.", "[serial]"),
        ({"serial": {"awaited": {"all": "no USB adapter is there"}}}, "note", "all: no USB adapter is there.", ""),
        (
            {"serial": {"unopened": {"/dev/ttyS0": "another program has it; stop that"}}},
            "bad",
            "/dev/ttyS0 cannot be opened: another program has it; stop that.",
            "",
        ),
        (
            {"brokers": {"mq:1883": {"connected": False, "refused": []}}},
            "bad",
            "The site's MQTT broker mq:1883 is not connected.",
            "journalctl",
        ),
        (
            {"commands": {"topic": "gateway-commands.gw1", "waiting": 0, "counts": {}, "error": "it is gone; make it"}},
            "warn",
            "No commands are read from gateway-commands.gw1: it is gone; make it.",
            "",
        ),
        (
            {"buffer_status": replace(FOUND, quarantined=2, quarantine_reasons={"no-route": 2})},
            "note",
            "2 messages could not be forwarded: 2 no-route.",
            "sluice buffer quarantine ls",
        ),
        (
            {"buffer_status": replace(FOUND, set_aside=("buffer.db.corrupt-1",))},
            "warn",
            "The buffer's file could not be used, and was set aside (buffer.db.corrupt-1).",
            "replace the memory card",
        ),
        (
            {"buffer_status": replace(FOUND, set_aside=("buffer.db.corrupt-1",), newer=("buffer.db.corrupt-1",))},
            "warn",
            "A newer version wrote the buffer's file, so this one has set it aside (buffer.db.corrupt-1).",
            "Update this box",
        ),
        ({"findings": (("7", "the tick stands still"),)}, "warn", "7: the tick stands still.", ""),
        (
            {"uplink": dataclass_replace(UP, refused_topics={"device-a": "compaction deletes readings"})},
            "warn",
            "Kafka's topic device-a is not written to: compaction deletes readings.",
            "sluice check",
        ),
        (
            {"uplink": EVENTS_REFUSED, "settings": with_route("device-{stream}", "both")},
            "warn",
            "Kafka's topic structured-device-a is not written to: it does not exist.",
            "later events then go there",
        ),
        (
            {"uplink": EVENTS_REFUSED, "settings": with_route("structured-device-{stream}", "structured")},
            "warn",
            "Kafka's topic structured-device-a is not written to: it does not exist.",
            "they then go by themselves",
        ),
        (
            {"uplink": dataclass_replace(UP, beyond_topics={"42": 3, "7": 1_480})},
            "warn",
            "7, 42 send for more new topics than this gateway makes.",
            "kafka.topics_per_device_day_max",
        ),
        (
            {"uplink": dataclass_replace(UP, parked={"device-a/3": "does not answer"})},
            "warn",
            "1 partition of Kafka's takes nothing: device-a/3 (does not answer).",
            "brokers",
        ),
        (
            {"uplink": dataclass_replace(DOWN, error=None, quota_used_up=True)},
            "warn",
            "the quota of the day is used up (kafka.bytes_per_day_max).",
            "Raise it",
        ),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], level: str, words: str, todo: str) -> None:
    alarm = only(replace(WELL, **changes))
    assert alarm.level == level
    assert words in alarm.words
    assert todo in alarm.todo
    assert alarm.words.endswith((".", "?"))
    assert headline(WELL, [alarm]).level == (level if todo or level != "note" else "well")


def test_a_clock_that_holds_all_readings_back_stands_before_what_stops_one_sensor() -> None:
    unsynced = ClockView(synced=False, error_us=None, since_us=0)
    held = dataclass_replace(UP, waits_for_clock=True, clock_until_us=10**10 + 7 * 60 * 10**6, was_reached=True)
    facts = replace(WELL, clock=unsynced, uplink=held, refused=(REFUSED,), silent=(Silent("7", 720.0, 1.0),))
    first, *rest = conditions(facts)
    assert first.means == "Readings wait on this box for it, for 7 min more at most (gateway.hold_unsynced_s)."
    assert [alarm.subject for alarm in rest] == ["Log-ins", "Devices"]
    # While it stops nothing, the others are worse.
    assert [alarm.subject for alarm in conditions(replace(facts, uplink=UP))] == ["Log-ins", "Devices", "Clock"]
    assert conditions(replace(WELL, refused=(REFUSED | {"ago_s": 600.0},))) == []
    assert "And of 2 more sensors the log-in" in conditions(replace(WELL, refused=(REFUSED,) * 5))[-1].words


@pytest.mark.parametrize(
    ("uplink", "means"),
    [
        (DOWN, "Once Kafka is reached, readings wait for it, for 10 min at most (gateway.hold_unsynced_s)."),
        (dataclass_replace(DOWN, was_reached=True), "Once Kafka is reached, readings go with times that may be wrong"),
        (dataclass_replace(UP, was_reached=True), "Readings go with times that may be wrong"),
    ],
)
def test_what_a_clock_that_is_not_synced_means_now(uplink: UplinkState, means: str) -> None:
    facts = replace(WELL, clock=ClockView(synced=False, error_us=None, since_us=0), uplink=uplink)
    (alarm,) = (alarm for alarm in conditions(facts) if alarm.subject == "Clock")
    assert alarm.means.startswith(means)


def test_of_many_some_are_named_and_the_rest_is_counted() -> None:
    names = [f"n{number}" for number in range(5)]
    broker = only(replace(WELL, brokers={"mq:1883": {"connected": True, "refused": names}}))
    assert broker.words == "The site's MQTT broker mq:1883 refuses n0, n1, n2 and 2 more."
    beyond = only(replace(WELL, uplink=dataclass_replace(UP, beyond_topics=dict.fromkeys(names, 2))))
    assert beyond.words == "n0, n1, n2 and 2 more send for more new topics than this gateway makes."
    assert beyond.means == "They go to the quarantine: 10 readings of theirs today."
    parked = only(replace(WELL, uplink=dataclass_replace(UP, parked=dict.fromkeys(names, "is away"))))
    assert parked.words == "5 partitions of Kafka's take nothing: n0 (is away), n1 (is away), n2 (is away) and 2 more."


def test_a_command_for_a_topic_is_not_cut() -> None:
    command = f"set it: sudo kafka-configs.sh --entity-name {'t' * 249} --command-config /{'f' * 400} --alter"
    assert f"{command}." in only(replace(WELL, uplink=dataclass_replace(UP, refused_topics={"t": command}))).words


def test_a_card_that_wears_out_soon() -> None:
    budget = write_budget(UsageHour(DAY_S, 10**6, 10**8, 50 * 10**9))
    worn = replace(WELL, card_days=budget.card_days)
    assert only(worn).words.startswith("A plain memory card lasts 80 d at the rate")
    assert only(worn).todo.startswith("Let Kafka have readings first")
    spared = replace(worn, uplink=dataclass_replace(UP, direct_topics=1))
    assert "buffer.commit_delay_ms" in only(spared).todo


def test_without_its_disk_a_gateway_acknowledges_what_kafka_takes_first() -> None:
    direct = replace(WELL, uplink=dataclass_replace(UP, direct_topics=1))
    for facts in (replace(direct, failing="disk I/O error"), replace(direct, full=True)):
        assert only(facts).means.startswith("Kafka takes readings without it, and they are acknowledged.")
    dropping = replace(WELL.settings.buffer, when_full="drop-oldest")
    full = replace(direct, full=True, settings=replace(WELL.settings, buffer=dropping))
    assert only(full).means.startswith("The oldest readings are dropped")


def test_it_says_where_readings_have_their_first_copy() -> None:
    assert not first_copy(WELL)
    topics = {"a": ONE_REPLICA, "b": SLOW, "c": ONE_REPLICA}
    mixed = replace(WELL, uplink=dataclass_replace(UP, direct_topics=3, disk_first=topics))
    kafka, one, slow = first_copy(mixed).split("; ")
    assert kafka == "Kafka has the readings of 3 topics first, and the disk is spared"
    assert one.startswith("the disk has those of a, c first, because one broker alone")
    assert slow == "the disk has those of b first, because Kafka did not answer within buffer.disk_after_ms"


@pytest.mark.parametrize(
    ("buffer", "kafka", "why"),
    [
        ({"disk_first": True}, {}, "buffer.disk_first is set"),
        ({"disk_after_ms": 0.0}, {}, "buffer.disk_after_ms is 0"),
        ({}, {"bytes_per_day_max": 10**6}, "on a metered link they wait 1000 ms for each other before they are sent"),
        ({}, {"linger_ms": 500.0}, "before they are sent, and buffer.disk_after_ms is only 500 ms"),
    ],
)
def test_it_says_why_the_disk_is_first_however_quick_kafka_is(
    buffer: dict[str, Any], kafka: dict[str, Any], why: str
) -> None:
    always = WELL.settings
    always = replace(always, buffer=replace(always.buffer, **buffer), kafka=replace(always.kafka, **kafka))
    assert why in first_copy(replace(WELL, settings=always, uplink=dataclass_replace(UP, direct_topics=3)))


def test_the_worst_comes_first_and_nothing_hostile_makes_it_long() -> None:
    everything = replace(
        WELL,
        uplink=dataclass_replace(
            DOWN, error="x" * 10_000, refused_topics={f"t{n}" * 200: "y" * 9_000 for n in range(99)}
        ),
        full=True,
        findings=tuple((f"d{number}" * 99, f"words {number}") for number in range(5_000)),
        silent=tuple(Silent("z" * 500, 100.0, 1.0) for _ in range(5_000)),
    )
    found = conditions(everything)
    assert [alarm.level for alarm in found] == sorted(
        (alarm.level for alarm in found), key=["bad", "warn", "note"].index
    )
    assert len(found) < 20
    assert sum(len(alarm.words) for alarm in found) < 5_000
    assert headline(everything, found).level == "bad"


def test_without_a_source_nothing_can_be_well() -> None:
    settings = replace(WELL.settings, mqtt_listener=None)
    assert "no section says where from" in only(replace(WELL, settings=settings)).words
