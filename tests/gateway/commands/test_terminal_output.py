"""No command prints anything that a terminal obeys, whatever sensors, brokers, files and settings call themselves."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer import schema
from gateway.buffer.rows import Series
from gateway.buffer.status import read_status, this_moment
from gateway.cli import main
from gateway.commands.buffer_commands import RoomLeft
from gateway.commands.status.device_table import device_rows
from gateway.commands.status.status_command import screen
from gateway.commands.status.words import Glance
from gateway.config import config_file
from gateway.devices.listing import read_devices
from gateway.host import service
from gateway.host.terminal_text import harmless, json_text
from gateway.intake.routes import NO_ROUTE
from gateway.toml_files.writer import value_text
from tests.support.buffers import entry, entry_of, input_of, opened, store
from tests.support.gateways import answering
from tests.support.terminals import WORST, assert_harmless, names

CONFIG = """\
[gateway]
id = "gw1"
clock = "system"
[buffer]
path = "{folder}/buffer.db"
[kafka]
bootstrap = ["127.0.0.1:1"]
[mqtt_listener]
port = 1883
"""


@pytest.fixture(autouse=True)
def no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "is_active", lambda _config: False)


def write_config(folder: Path, extra: str = "") -> Path:
    config = folder / "gateway.toml"
    config.write_text(CONFIG.format(folder=folder) + extra)
    return config


def sluice(*words: str | Path, columns: int = 1_000) -> Result:
    """A command; all that it prints is harmless."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, [*map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert_harmless(done.output)
    return done


async def fill(path: Path, hostile: list[str]) -> None:
    """A buffer in which each name stands for all that a sensor, a topic or a reason may be called."""
    entries = []
    for name in hostile:
        series = Series(f"device-{name}", name, name, f"device/{name}", "sluice.reading", name, f"device/{name}")
        entries.append(entry_of(series, name.encode(), device_boot=name, device_sequence=1))
        for reason in (name, NO_ROUTE):
            set_aside = input_of(reason, name.encode(), name, name, device_boot=name, topic=name, writer=name)
            entries.append(replace(entry(b"report", REPORTS), quarantined=set_aside))
    async with opened(path) as buffer:
        assert await store(buffer, entries)
    connection = schema.connect(path)
    for number, name in enumerate(hostile):
        connection.execute("INSERT INTO loss VALUES (?, ?, ?, '', 3, 0, 0, NULL, NULL)", (name, f"{name}{number}", "b"))
    # As a file that was salvaged, or that somebody has written to.
    connection.execute("UPDATE lane SET name = ?", (hostile[0],))
    connection.close()


_folders = count()
REPORTS = "reports"
"""Device of the reports on quarantined input."""


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(names, min_size=1, max_size=3, unique=True))
def test_no_command_that_reads_the_buffer_prints_what_is_obeyed(
    tmp_path_factory: pytest.TempPathFactory, hostile: list[str]
) -> None:
    folder = tmp_path_factory.mktemp(f"buffer-{next(_folders)}")
    config = write_config(folder)
    asyncio.run(fill(folder / "buffer.db", hostile))
    at = ("--config", config)
    first = hostile[0]
    for command in ("status", "devices", "buffer ls", "buffer peek", "buffer quarantine ls", "buffer verify"):
        assert sluice(*command.split(), *at).exit_code == 0
        assert sluice(*command.split(), *at, columns=40).exit_code == 0
    sluice("buffer", "peek", "--device", f"{first}?", *at)
    sluice("buffer", "quarantine", "ls", "--reason", f"{first}?", *at)
    sluice("buffer", "quarantine", "ls", "--reason", first, "--device", f"{first}?", *at)
    sluice("buffer", "export", "--device", f"{first}?", *at)
    sluice("reset", "--yes-wipe", first, *at)
    assert_whole(hostile, at)
    # Last, because they change the files.
    sluice("buffer", "quarantine", "retry", "--reason", first, *at)
    sluice("buffer", "quarantine", "retry", "--all", "--json", *at)
    sluice("buffer", "quarantine", "drop", "--yes", "--reason", first, *at)


def assert_whole(hostile: list[str], at: tuple[str | Path, ...]) -> None:
    """JSON tells each name as it is stored."""

    def told(*command: str) -> Any:
        return json.loads(sluice(*command, "--json", *at).stdout)

    def lines(*command: str) -> list[Any]:
        return [json.loads(line) for line in sluice(*command, *at).stdout.splitlines()]

    for command in (("status",), ("devices",), ("buffer", "ls")):
        assert {device["device"] for device in told(*command)["devices"]} - {REPORTS} == {*hostile}
    assert told("buffer", "verify")
    for found in (told("buffer", "peek"), lines("buffer", "export")):
        readings = [each for each in found if each["device"] != REPORTS]
        assert {each["device"] for each in readings} == {each["payload"] for each in readings} == {*hostile}
        assert {each["topic"] for each in readings} == {f"device-{name}" for name in hostile}
    assert {each["reason"] for each in told("buffer", "quarantine", "ls")} == {*hostile, NO_ROUTE}
    for each in lines("buffer", "export", "--quarantine"):
        payload = each["payload"] if "payload" in each else base64.b64decode(each["payload_base64"]).decode()
        assert {each["device"], each["subject"], each["topic"], each["writer"], payload} <= {*hostile}


# -- what a daemon answers ----------------------------------------------------------------------------

PORT = {"device": "D", "trouble": "", "acknowledges": False, "used_s": 3.0, "refused": 2}
STATE: dict[str, Any] = {
    "buffer": {"full": False, "failing": "F"},
    "uplink": {
        "up": False,
        "error": "E",
        "parked": {"P": "W"},
        "refused_topics": {"T": "W --command-config"},
    },
    "counts": {"readings": 3, "identity-missing": 2, "payload-not-json": 2, "time-missing": 1},
    "counted_last": {"identity-missing": "D", "time-missing": "D"},
    "payload_faults": {
        kind: [{"device": "D", "cause": "C", "told_us": 1, "received_us": 1, "readings": 2}]
        for kind in ("identity-missing", "payload-not-json")
    },
    "mqtt_brokers": {"B": {"connected": True, "refused": ["R"]}},
    "mqtt_listener": {"R": 4},
    "log_ins_refused": [{"user": "N", "address": "A", "why": "R", "ago_s": 3.0}],
    "serial": {
        "ports": {
            "/dev/a": PORT | {"refused_last": {"reason": "R", "line": "L"}, "rivals": "R", "shared": "S"},
            "/dev/b": PORT | {"device": None, "trouble": "T"},
            "/dev/c": {
                "device": "D",
                "kind": "Modbus",
                "units": {
                    "U": {"answers": True, "asked": 2, "fault": "F", "refused": {"R": "W"}},
                    "V": {"answers": False, "asked": 2, "fault": "F", "refused": {}},
                },
            },
        },
        "unopened": {"/dev/d": "R"},
        "gone": {"/dev/e": {"devices": ["D"], "gone_s": 3.0}},
        "missing": ["/dev/f"],
        "awaited": {"/dev/g": "W"},
    },
    "up_s": 100.0,
}
DEVICES: dict[str, Any] = {
    "devices": [
        {
            "device": "D",
            "heard": {
                "subject": "S",
                "is_serial": False,
                "boot": "B",
                "tells": "time",
                "readings": 3,
                "since_us": 1,
                "received_us": 2,
                "faults": {
                    kind: {"device": "D", "cause": "C", "told_us": 2, "received_us": 2, "readings": 2}
                    for kind in ("identity-missing", "payload-not-json")
                },
                "odd_date": {"reason": "ahead", "told": "T", "off_us": None, "received_us": 2},
            },
            "clocks": [
                {
                    "stream": "S",
                    "boot": "B",
                    "kind": "rc",
                    "paced_by": "rc",
                    "drift_ppm": [1.0, 2.0],
                    "error_us": 1,
                    "observed_us": 1,
                    "has_jumped": False,
                }
            ],
        }
    ],
    "is_last": True,
}


def spoiled(value: Any) -> Any:
    """The answer with each name and word in it replaced by the worst one. Keys of counts stay."""
    if isinstance(value, dict):
        kept = {"buffer", "uplink", "counts", "counted_last", "serial"} <= value.keys()
        named = any(isinstance(each, dict) for each in value.values()) and not kept
        return {
            (f"{name}{WORST}" if named and (name[0].isupper() or name[0] == "/") else name): spoiled(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [spoiled(each) for each in value]
    if isinstance(value, str) and value and (value[0].isupper() or value[0] == "/"):
        return value + WORST
    return value


async def test_no_answer_of_a_daemon_is_obeyed(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    path = tmp_path / "buffer.db"
    state, devices = spoiled(STATE), spoiled(DEVICES)
    asked: list[str] = []

    def answer(name: str, result: object) -> Callable[[dict[str, Any]], Any]:
        async def answer(_arguments: dict[str, Any]) -> object:
            asked.append(name)
            return result

        return answer

    answers = {
        "state": answer("state", state),
        "devices": answer("devices", devices),
        "quarantine-retry": answer("retry", {"stored": 0, "unknown": 0, "refused": {WORST: 1}}),
        "devices-changed": answer("changed", {"file": f"/{WORST}", "trouble": WORST, "ended": 0}),
    }
    async with opened(path) as buffer, answering(path, answers):
        set_aside = input_of(NO_ROUTE, b"x", "42", "kitchen")
        assert await store(buffer, [entry(), replace(entry(b"report"), quarantined=set_aside)])
        for command in (
            "status",
            "devices",
            "devices list",
            "devices add 43 --no-qr",
            "devices revoke 43 --yes",
            "buffer quarantine retry --all",
            "check",
        ):
            for options in ((), ("--json",)):
                words = [*command.replace("43", f"4{len(options)}").split(), *options]
                done = await asyncio.to_thread(sluice, *words, "--config", config)
                assert not options or json.loads(done.stdout), words
        lines = await asyncio.to_thread(drawn, config, state)
    assert_harmless("\n".join(lines))
    assert {*asked} == {"state", "devices", "retry", "changed"}


def drawn(config: Path, state: dict[str, Any]) -> list[str]:
    """The screen of `sluice status`."""
    found = config_file.load(config)
    listing = read_devices(found)
    seen = Glance(
        found,
        read_status(found.buffer.path),
        state,
        "",
        RoomLeft(1_000, 3.0, 3.0),
        0,
        this_moment(found.gateway),
        1e9,
        devices=device_rows(listing, {}, 100.0),
    )
    return [harmless(line) for line in screen(seen)]


# -- what stands in files and is typed ------------------------------------------------------------------


@settings(max_examples=15)
@given(names)
def test_no_word_of_settings_and_answers_is_obeyed(tmp_path_factory: pytest.TempPathFactory, hostile: str) -> None:
    folder = tmp_path_factory.mktemp(f"settings-{next(_folders)}")
    written = value_text(hostile)
    good = write_config(folder)
    for extra in _mistakes(written):
        config = write_config(folder, extra)
        sluice("status", "--config", config)
    config = write_config(folder)
    answers = folder / "answers.toml"
    answers.write_text(f"[gateway]\nid = {written}\n{written} = 1\n[kafka]\nbootstrap = [{written}]\n")
    sluice("setup", "--config", folder / "other.toml", "--answers", answers, "--no-check")
    (folder / "sluice.toml").write_text(answers.read_text())
    sluice("provision", "--config", folder / "other.toml", folder)
    report = (folder / "sluice-report.txt").read_text()
    assert_harmless(report)
    # A person's own line breaks stay.
    typed = hostile.replace("\n", "") + "x"
    for words in (("settings", typed), ("status", typed), (typed,), (f"--{typed}",)):
        sluice(*words)
    for command in ("add", "revoke", "rotate"):
        sluice("devices", command, "--config", good, "--", typed)


def _mistakes(written: str) -> Iterator[str]:
    yield f"{written} = 1\n"
    yield f"[mqtt_listener.users]\n{written} = {written}\n"
    yield f"[[routes]]\ntopic = {written}\nkafka = {written}\n"
    yield f"[[mqtt_brokers]]\nhost = {written}\ntopics = [{written}]\n"
    yield f"[serial]\nports = [{written}]\n"


def test_half_a_surrogate_pair_is_printed_and_read_back() -> None:
    told = {"path": "/dev/\udcff", "words": WORST}
    assert_harmless(json_text(told))
    assert json.loads(json_text(told)) == told
    assert json_text({"device": "Küche"}) == msgspec.json.encode({"device": "Küche"}).decode()
