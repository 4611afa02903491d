"""The page's figures: devices and their values, silence, whether the gateway does its work, Prometheus."""

import asyncio
import json
import re
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from gateway.buffer.rows import Entry, Loss
from gateway.buffer.shares import AboveShare
from gateway.clock.kernel_clock import boot_id, boottime_us
from gateway.config import running_settings
from gateway.health import survey
from gateway.health.conditions import conditions
from gateway.health.survey import OnDisk, look_at_the_file
from gateway.host import last_update
from gateway.listener.credentials import add
from gateway.page import metrics, view
from gateway.page.view import StatusView
from gateway.settings import (
    ListenerSettings,
    StatusPageSettings,
)
from gateway.uplink.state import UplinkState
from tests.gateway.health.test_conditions import WELL
from tests.support.quiet_gateway import QuietGateway


class Box(QuietGateway):
    """A gateway with a status page."""

    def __init__(self, folder: Path, devices_max: int = 200) -> None:
        super().__init__(folder, StatusPageSettings(history_devices_max=devices_max))
        self.view = StatusView(self.survey)

    def look(self) -> None:
        self.view.history.record(self.front_door.heard, self.view._sample(), boottime_us())

    async def refreshed(self) -> None:
        """One round of `refresh`."""
        await self.survey.look()
        self.view._ready.set()

    async def state(self, query: str = "", limit: int = 50) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(msgspec.json.encode(await self.view.state(query, limit)))
        return found


@pytest.fixture
async def box(tmp_path: Path) -> Any:
    found = Box(tmp_path)
    yield found
    await found.buffer.close()


async def test_a_gateway_that_goes_on_by_its_former_name_says_so(box: Box, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('[gateway]\nid = "barn-9"\n[kafka]\nbootstrap = ["127.0.0.1:1"]\n')
    box.survey._file = running_settings.SettingsFile(config, box.settings)
    await box.survey.look_at_the_file()
    (changed,) = (each for each in conditions(box.survey.facts()) if each.code == "settings-changed")
    assert changed.means == "It goes on with those of before, as default/barn-1."


async def test_an_update_of_the_image_is_shown(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_update, "FILE", tmp_path / "last.json")
    update = last_update.LastUpdate("1", "1.0", "1.1", "b", last_update.Before(), "good")
    told = {}
    for result in (None, update, replace(update, result="went-back", reason="Kafka is not reached")):
        if result is not None:
            last_update.write(result)
        await box.refreshed()
        state = await box.state()
        told[result and result.result] = state["update"], [alarm["code"] for alarm in state["alarms"]]
    assert told == {None: ("", []), "good": (update.words, []), "went-back": ("", ["update-went-back"])}
    monkeypatch.setattr(last_update, "REFUSED", tmp_path / "refused.json")
    last_update.write(replace(update, result="refused", reason="a.raucb: it is torn"), last_update.REFUSED)
    await box.refreshed()
    assert "update-refused" in [alarm["code"] for alarm in (await box.state())["alarms"]]


async def test_a_device_with_its_reading(box: Box) -> None:
    await box.take("42")
    box.look()
    await box.refreshed()
    state = await box.state()
    (device,) = state["devices"]["shown"]
    assert (device["device"], device["place"], device["serial"]) == ("42", "device/42/thermo", False)
    assert device["values"] == [["celsius", 21.5]]
    assert 0 <= device["heard_s"] < 5
    assert state["headline"]["level"] == "well"
    assert state["buffer"]["rows"] >= 1
    curves = box.view.curves("", 50)
    assert curves["devices"]["42"]["metric"] == ("device/42/thermo", "celsius")  # type: ignore[index]


async def test_devices_in_trouble_come_first_and_names_as_people_count(box: Box) -> None:
    for name in ("10", "9", "barn-2", "barn-10", "1"):
        await box.take(name)
    for ago_s in (300, 200, 100):
        await box.take("barn-3", ago_s=ago_s)
        box.look()
    await box.refreshed()
    state = await box.state()
    assert [each["device"] for each in state["devices"]["shown"]] == ["1", "9", "10", "barn-2", "barn-3", "barn-10"]
    box.front_door.heard.get("barn-3").received_us -= 900_000_000  # type: ignore[union-attr]
    await box.refreshed()
    state = await box.state()
    first = state["devices"]["shown"][0]
    assert (first["device"], first["silent"], state["devices"]["silent"]) == ("barn-3", True, 1)
    assert state["headline"]["words"].startswith("barn-3 has been silent for 16 min")


async def test_a_sensor_that_sleeps_for_ten_minutes_is_not_silent_for_that(box: Box) -> None:
    await box.take("goat", ago_s=1_500)
    box.look()
    await box.take("goat", ago_s=900)
    box.look()
    await box.take("goat", ago_s=899)
    await box.refreshed()
    assert (await box.state())["devices"]["silent"] == 0


async def test_a_device_that_was_revoked_is_no_alarm(box: Box) -> None:
    box.survey.settings = replace(box.settings, mqtt_listener=ListenerSettings(users={"43": "0" * 64}))
    for device in ("42", "43"):
        for ago_s in (4_000.0, 3_900.0):
            await box.take(device, ago_s=ago_s)
    await box.refreshed()
    assert [each.device for each in box.survey.facts().silent] == ["43"]


async def test_what_is_searched_for_is_found_by_name_and_by_place(box: Box) -> None:
    for name in ("goat-1", "goat-2", "sheep-1"):
        await box.take(name)
    await box.refreshed()
    for query, found in (("GOAT", 2), ("device/sheep", 1), ("cow", 0), ("", 3)):
        assert (await box.state(query))["devices"]["matching"] == found
    assert len((await box.state("", 2))["devices"]["shown"]) == 2


async def test_losses_are_told_before_and_after_they_are_reported(box: Box) -> None:
    now_us = boottime_us()
    box.buffer.count_loss(Loss("42", "refused", boot_id(), 7, now_us, now_us))
    await box.take("42")
    await asyncio.sleep(1.2)
    await box.refreshed()
    state = await box.state()
    assert (state["intake"]["lost"], state["devices"]["shown"][0]["lost"]) == (7, 7)
    assert state["headline"]["words"].startswith("7 readings are lost for good (refused), the last ")
    await box.front_door.events.report_losses()
    await box.refreshed()
    state = await box.state()
    assert (state["intake"]["lost"], state["devices"]["shown"][0]["lost"]) == (7, 7)
    assert state["headline"]["words"].startswith("7 readings are lost for good, the last ")


async def test_an_offline_and_a_full_gateway_is_healthy_and_a_failing_one_is_not(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "HEALTH_S", 0)
    # Values that are set here are not measured anew.
    monkeypatch.setattr(box.buffer._commits, "_measure", lambda **_: None)
    assert await box.view.health() == {"status": "ok"}
    box.uplink = UplinkState(error="secret.example refuses the password of barn-1")
    box.buffer.state.full = True
    assert await box.view.health() == {
        "status": "ok",
        "warnings": ["the buffer is full", "Kafka is not reached"],
        "codes": ["buffer-full", "kafka-unreached"],
    }
    box.uplink.barred = True
    assert (await box.view.health())["codes"] == ["buffer-full", "kafka-unusable"]
    box.uplink.quota_used_up = True
    assert (await box.view.health())["codes"] == ["buffer-full", "quota-used-up"]
    box.uplink.barred = box.uplink.quota_used_up = False
    box.buffer.state.full, box.buffer.state.above_share_devices = False, 1
    told = await box.view.health()
    assert told["warnings"] == ["devices hold more than their share of the buffer", "Kafka is not reached"]
    box.buffer.state.failing = "disk I/O error at /secret/path"
    told = await box.view.health()
    assert (told["status"], told["code"]) == ("failing", "disk-failing")
    assert str(told["reason"]).startswith("the buffer cannot be written")
    assert "secret" not in str(told)
    box.uplink = UplinkState(up=True, direct_topics=1)
    told = await box.view.health()
    assert (told["status"], told["codes"]) == ("ok", ["disk-failing", "above-share"])


async def test_a_sensor_with_a_wrong_secret_is_an_alarm(box: Box) -> None:
    await box.refreshed()
    assert (await box.state())["alarms"] == []
    box.refused.append({"user": "attic", "address": "192.0.2.7", "why": "the password is wrong", "ago_s": 2.0})
    (alarm,) = (await box.state())["alarms"]
    assert alarm["code"] == "log-in-refused"
    assert alarm["words"] == "The log-in of attic from 192.0.2.7 was refused 2 s ago: the password is wrong."


async def test_who_misses_readings_and_who_was_not_heard_yet(box: Box) -> None:
    add(box.settings.buffer.path.parent / "devices.json", ["42", "attic", "shed"], datetime.now(UTC))
    await box.take("42")
    await box.refreshed()
    state = await box.state()
    assert state["devices"]["not_heard"] == "not heard yet: attic, shed"
    assert state["headline"]["level"] == "well", "they may be on a shelf"
    heard = box.front_door.heard.get("42")
    assert heard is not None
    heard.first_sequence, heard.top_sequence = 0, 20
    (alarm,) = (await box.state())["alarms"]
    assert alarm["words"] == "Readings are missing of 42 (≥ 20)."


async def test_a_clock_that_is_taken_as_it_is_is_not_said_to_be_synced(box: Box) -> None:
    await box.refreshed()
    assert (await box.state())["clock"] == {"synced": True, "words": "taken as it is, within ± 1.0 ms"}


async def test_a_thread_that_hangs_is_no_health(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "ANSWER_S", 0.1)
    monkeypatch.setattr(box.buffer, "answers", asyncio.Event().wait)
    told = await box.view.health()
    assert (told["status"], told["code"]) == ("failing", "disk-hangs")
    assert "has not answered" in str(told["reason"])


async def test_health_is_found_out_once_a_second(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = 0

    async def judge() -> dict[str, object]:
        nonlocal judged
        judged += 1
        return {"status": "ok"}

    monkeypatch.setattr(box.view, "_judge", judge)
    await asyncio.gather(*(box.view.health() for _ in range(100)))
    assert judged == 1


async def test_metrics_are_what_prometheus_takes(box: Box) -> None:
    await box.take("42")
    await box.take('4"2\\', "1")
    box.look()
    await box.refreshed()
    box.buffer.state.above_share = [AboveShare('4"2\\', 5_000, 3)]
    text = (await box.view.metrics()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["sluice_readings"].samples[0].value == 2
    assert families["sluice_uplink_up"].samples[0].value == 1
    assert families["sluice_buffer_bytes"].samples[0].value > 0
    (above,) = families["sluice_buffer_above_share_bytes"].samples
    assert (above.labels["device"], above.value) == ('4"2\\', 5_000)
    devices = {sample.labels["device"] for sample in families["sluice_device_silence_seconds"].samples}
    assert "42" in devices
    assert all(re.fullmatch(r"(sluice|process)_[a-z0-9_]+", name) for name in families)
    assert all(family.documentation for name, family in families.items() if name.startswith("sluice_"))


def test_metrics_of_commands_are_those_of_a_gateway_that_reads_them() -> None:
    versions = {"sluice": "1", "python": "3", "sqlite": "3"}
    commands = {"topic": "t", "waiting": 2, "counts": {"read": 9, "repeated": 1, "delivered": 4, "expired": 2}}
    told = metrics.text(replace(WELL, commands=commands), versions, {}, []).decode()
    ended = {line for line in told.splitlines() if line.startswith("sluice_commands_ended_total{")}
    # An outcome that never came is 0, so that its first increase is seen.
    assert ended == {
        f'sluice_commands_ended_total{{outcome="{name}"}} {count}'
        for name, count in (("delivered", 4.0), ("expired", 2.0), ("refused", 0.0), ("unknown-device", 0.0))
    }
    assert "\nsluice_commands_open 2.0\n" in told
    assert "sluice_commands" not in metrics.text(WELL, versions, {}, []).decode()


async def test_devices_beyond_the_bound_have_no_label(tmp_path: Path) -> None:
    box = Box(tmp_path, devices_max=3)
    for number in range(10):
        await box.take(str(number))
    box.look()
    await box.refreshed()
    text = (await box.view.metrics()).decode()
    assert text.count("sluice_device_readings_total{") == 3
    assert "sluice_devices 10.0" in text
    await box.buffer.close()


async def test_a_mistake_while_gathering_is_logged_and_tried_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "LOOK_S", 0.01)
    monkeypatch.setattr(view, "DEVICES_S", 0.01)
    monkeypatch.setattr(box.view.history, "record", lambda *_: 1 / 0)
    monkeypatch.setattr(box.survey, "look_at_devices", lambda: 1 / 0)
    tasks = [asyncio.create_task(box.view.follow()), asyncio.create_task(box.view.refresh())]
    assert (await box.state())["devices"]["total"] == 0
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_gathered_while_nobody_looks(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def look_at(*_: object) -> OnDisk:
        nonlocal looks
        looks += 1
        return OnDisk()

    monkeypatch.setattr(survey, "look_at_the_file", look_at)
    task = asyncio.create_task(box.view.refresh())
    await asyncio.sleep(0.2)
    assert looks == 0
    await box.state()
    assert looks == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_who_looks_after_a_while_sees_nothing_that_is_old(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("WATCHED_S", 0.1), ("DEVICES_S", 0.05), ("FILE_S", 60)):
        monkeypatch.setattr(view, name, seconds)
    task = asyncio.create_task(box.view.refresh())
    assert (await box.state())["devices"]["total"] == 0
    await asyncio.sleep(0.3)
    await box.take("42")
    now_us = boottime_us()
    box.buffer.count_loss(Loss("42", "refused", boot_id(), 7, now_us, now_us))
    await asyncio.sleep(1.2)
    state = await box.state()
    assert (state["devices"]["total"], state["intake"]["lost"]) == (1, 7)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_file_that_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert look_at_the_file(tmp_path / "none.db").buffer_status is None
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    found = look_at_the_file(path)
    assert found.buffer_status is None
    assert found.disk_free_bytes


def test_a_payload_of_the_latest_reading_is_the_entry_itself() -> None:
    """The front door keeps no copy."""
    from gateway.intake.devices_heard import DevicesHeard
    from tests.support.buffers import entry

    heard, one = DevicesHeard(), replace(entry())
    heard.latest = {}
    heard.record([one])
    (kept,) = heard.latest.values()
    assert isinstance(kept, Entry)
    assert kept is one
