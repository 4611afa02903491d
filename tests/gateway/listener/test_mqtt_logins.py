"""Who may log in changes with the devices' file at once. A file that cannot be read changes nothing."""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from structlog.testing import capture_logs

from gateway.listener.access import Identity
from gateway.listener.credentials import add, digest, revoke, rotate
from gateway.listener.logins import NOBODY, RETRY_INTERVAL_S, TROUBLE_INTERVAL_S, Logins
from gateway.settings import ListenerSettings
from tests.support.mqtt_peers import (
    ACCEPTED,
    CODEWORD,
    USERS,
    RecordingIntake,
    connect,
    connected,
    listening,
    puback,
    publish,
)
from tests.support.waiting import patience, until

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
LOGIN = ("m001", CODEWORD)


class World:
    """A file, and a clock that the test sets."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.path = directory / "devices.json"
        self.now_s = NOW.timestamp()
        self.settings = ListenerSettings(**settings)  # type: ignore[arg-type]

    def logins(self) -> Logins:
        return Logins(self.settings, self.path, lambda: self.now_s)


def test_the_settings_and_the_file_are_united_and_the_file_is_read_as_it_changes(tmp_path: Path) -> None:
    world = World(tmp_path, users=USERS, operators={"ops": "0" * 64})
    logins = world.logins()
    assert not logins.reread()
    assert set(logins) == {"m001", "m002", "ops"}
    (made,) = add(world.path, ["43"], NOW)
    assert "43" not in logins
    assert logins.reread()
    assert not logins.reread()
    assert logins.devices["43"] == (digest(made.secret),)
    assert "43" in logins
    add(world.path, ["boss"], NOW, operators=True)
    assert logins.reread()
    assert "boss" in logins.operators
    revoke(world.path, ["43", "boss"])
    assert logins.reread()
    assert set(logins) == {"m001", "m002", "ops"}


def test_an_old_secret_ends_by_itself_and_never_comes_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    (old,) = add(world.path, ["42"], NOW)
    new = rotate(world.path, "42", NOW, keep_old_hours=2)
    logins = world.logins()
    assert set(logins.devices["42"]) == {digest(old.secret), digest(new.secret)}
    world.now_s += 7_199
    assert not logins.reread()
    world.now_s += 1
    assert logins.reread()
    assert logins.devices["42"] == (digest(new.secret),)
    assert not logins.is_valid(Identity("42", digest=digest(old.secret)))
    assert logins.is_valid(Identity("42", digest=digest(new.secret)))
    world.now_s -= 86_400
    assert not logins.reread()
    assert logins.devices["42"] == (digest(new.secret),)


@pytest.mark.parametrize("how", ["damaged", "gone", "a directory", "not ours"])
def test_a_file_that_cannot_be_read_leaves_all_as_it_is_and_is_told_of_loudly(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    add(world.path, ["42"], NOW)
    logins = world.logins()
    before = dict(logins.devices)
    kept = world.path.read_bytes()
    world.path.unlink()
    if how == "a directory":
        world.path.mkdir()
    elif how == "damaged":
        world.path.write_bytes(kept[:-20])
    elif how == "not ours":
        world.path.write_bytes(kept)

        def refuse(*_: object, **__: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    with capture_logs() as lines:
        for _ in range(int(TROUBLE_INTERVAL_S) + 60):
            assert not logins.reread()
            world.now_s += 1
    assert [line["log_level"] for line in lines] == ["error", "error"], "at once, and once an hour"
    assert all(str(world.path) in line["why"] and "until this gateway ends" in line["meaning"] for line in lines)
    assert logins.devices == before
    assert logins.state() == {"file": str(world.path), "devices": 1, "trouble": lines[0]["why"], "kept": True}
    monkeypatch.undo()
    if how == "a directory":
        world.path.rmdir()
    world.path.write_bytes(kept)
    world.now_s += RETRY_INTERVAL_S
    with capture_logs() as lines:
        assert logins.reread()
    assert [line["log_level"] for line in lines] == ["info"]
    assert logins.state()["trouble"] is None


def test_a_gateway_that_starts_with_a_damaged_file_lets_nobody_of_it_in(tmp_path: Path) -> None:
    world = World(tmp_path, users=USERS)
    world.path.write_text("{")
    with capture_logs() as lines:
        logins = world.logins()
    assert [line["meaning"] for line in lines] == ["none of its devices can log in until it can be read"]
    assert not logins.state()["kept"]
    assert set(logins) == set(USERS)


def test_certificates_name_one_who_is_listed_once_there_is_a_list(tmp_path: Path) -> None:
    world = World(tmp_path)
    logins = world.logins()
    assert logins.is_valid(Identity("42"))
    add(world.path, ["42", "43"], NOW)
    logins.reread()
    assert logins.listed
    assert logins.is_valid(Identity("42"))
    revoke(world.path, ["42", "43"])
    logins.reread()
    assert logins.listed
    assert not logins.is_valid(Identity("42"))
    assert world.logins().listed, "after a restart too"


def test_who_has_no_secret_keeps_none(tmp_path: Path) -> None:
    logins = World(tmp_path, users=USERS).logins()
    assert logins.is_valid(Identity(None))
    assert logins.is_valid(Identity("$check-1", is_check=True))
    assert not logins.is_valid(Identity("m001", operator=True, digest=USERS["m001"]))


@pytest.mark.parametrize(
    ("added", "anonymous", "warned"), [(False, False, True), (True, False, False), (False, True, False)]
)
async def test_a_listener_that_can_let_nobody_in_says_so(
    added: bool,  # noqa: FBT001
    anonymous: bool,  # noqa: FBT001
    warned: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    path = tmp_path / "devices.json"
    if added:
        add(path, ["42"], NOW)
    with capture_logs() as lines:
        async with listening(RecordingIntake(), anonymous=anonymous, devices_file=path):
            pass
    assert any(line["event"] == NOBODY for line in lines) == warned


# -- live -----------------------------------------------------------------------------------------


class Sensor:
    """paho, as a sensor's firmware has it: it connects once, and notes how that ends."""

    def __init__(self, port: int, name: str, secret: str) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[str] = loop.create_future()
        self.ended = asyncio.Event()
        self.stored = 0
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"c-{name}", reconnect_on_failure=False)
        self._client.username_pw_set(name, secret)

        def answered(*arguments: object) -> None:
            told = str(arguments[3])
            loop.call_soon_threadsafe(lambda: None if self.answer.done() else self.answer.set_result(told))

        def stored(*_: object) -> None:
            self.stored += 1

        def ended(*_: object) -> None:
            loop.call_soon_threadsafe(self.ended.set)

        self._client.on_connect = answered
        self._client.on_disconnect = ended
        self._client.on_publish = stored
        self._client.connect_async("127.0.0.1", port)
        self._client.loop_start()

    async def is_in(self) -> bool:
        async with asyncio.timeout(patience(5)):
            return await self.answer == "Success"

    async def measure(self, topic: str) -> None:
        before = self.stored
        self._client.publish(topic, "{}", qos=1)
        await until(lambda: self.stored > before)

    async def stop(self) -> None:
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)


@asynccontextmanager
async def fleet() -> AsyncIterator[dict[str, Sensor]]:
    sensors: dict[str, Sensor] = {}
    try:
        yield sensors
    finally:
        for sensor in sensors.values():
            await sensor.stop()


@pytest.mark.parametrize("seed", range(3))
async def test_real_clients_are_in_as_long_as_their_secret_is_good(seed: int, tmp_path: Path) -> None:
    """Random changes against a model: every connected client has a good secret, and every good secret gets in."""
    drawn = random.Random(seed)  # noqa: S311 - a test that can be repeated
    path = tmp_path / "devices.json"
    good: dict[str, str] = {}
    async with (
        listening(
            RecordingIntake(), anonymous=False, users=USERS, devices_file=path, failed_logins_per_minute_max=1_000
        ) as listener,
        fleet() as sensors,
    ):
        bystander = sensors["bystander"] = Sensor(listener.port, *LOGIN)
        assert await bystander.is_in()
        for step in range(25):
            name = f"d{drawn.randrange(3)}"
            action = drawn.choice(["add", "rotate", "rotate, keep", "revoke"])
            hours = 1.0 if action == "rotate, keep" else 0.0
            wrong = good.get(name, "none")
            if action == "add" and name not in good:
                (made,) = add(path, [name], datetime.now(UTC))
                good[name] = made.secret
            elif action.startswith("rotate") and name in good:
                made = rotate(path, name, datetime.now(UTC), 0.0 if step % 2 else hours)
                good[name] = made.secret
                hours = 0.0 if step % 2 else hours
            elif action == "revoke" and name in good:
                revoke(path, [name])
                del good[name]
            else:
                continue
            await listener.devices_changed({})
            connected_now = {key[0] for key in listener.shared.sessions}
            assert connected_now <= {"m001", *good}
            if name in sensors:
                kept = hours > 0 and name in good
                if not kept:
                    await asyncio.wait_for(sensors[name].ended.wait(), patience(5))
                else:
                    await sensors[name].measure(f"device/{name}/thermo")
                await sensors.pop(name).stop()
            if wrong != good.get(name) and not hours:
                refused = Sensor(listener.port, name, wrong)
                assert not await refused.is_in()
                await refused.stop()
            if name in good:
                sensors[name] = Sensor(listener.port, name, good[name])
                assert await sensors[name].is_in()
                await sensors[name].measure(f"device/{name}/thermo")
        await bystander.measure("device/m001/thermo")
        assert not bystander.ended.is_set()


async def test_a_revoked_devices_readings_under_way_are_stored_and_its_will_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    (made,) = add(path, ["m003"], NOW)
    intake = RecordingIntake()
    with capture_logs() as lines:
        async with listening(intake, anonymous=False, devices_file=path) as listener:
            first = connect("c", login=("m003", made.secret), will="died")
            async with connected(listener, first, ACCEPTED) as peer:
                intake.outcome = None
                peer.writer.write(publish("a", 1, "device/m003/thermo"))
                await until(lambda: intake.batches)
                revoke(path, ["m003"])
                assert await listener.devices_changed({}) == {
                    "file": str(path),
                    "devices": 0,
                    "trouble": None,
                    "kept": True,
                    "ended": 1,
                }
                peer.writer.write(publish("b", 2, "device/m003/thermo"))
                intake.decide_all()
                assert await peer.read_to_end() == puback(1)
            assert listener.counts["credentials-ended"] == 1
            async with connected(listener, first) as peer:
                await peer.read_to_end()
    assert [reading.datum.payload for reading in intake.stored] == [b"a"]
    assert "device-died" not in {kind for kind, _, _ in intake.events}
    (line,) = [line for line in lines if line.get("reason") == "credentials-ended"]
    assert line["user"] == "m003"
    # Its name is known to be no secret. It is shown, so that a person knows whose power to cut.
    assert [line["user"] for line in lines if line.get("reason") == "bad-credentials"] == ["m003"]
    assert made.secret not in str(lines)


async def test_without_a_command_the_file_is_looked_at_each_second(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    async with listening(RecordingIntake(), anonymous=False, users=USERS, devices_file=path) as listener:
        (made,) = add(path, ["m003"], datetime.now(UTC))
        await until(lambda: "m003" in listener.logins)
        async with connected(listener, connect("c", login=("m003", made.secret)) + publish("a", 1)) as peer:
            assert await peer.read(8) == ACCEPTED + puback(1)
            rotate(path, "m003", datetime.now(UTC) - timedelta(hours=1), keep_old_hours=1)
            assert await peer.read_to_end() == b""
