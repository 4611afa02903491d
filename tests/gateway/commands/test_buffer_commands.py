"""`sluice buffer`, as an installer uses it: on a stopped gateway and beside a running one."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from gateway.buffer import schema
from gateway.buffer.buffer import Buffer
from gateway.buffer.quarantine import TOPIC_FORBIDDEN
from gateway.buffer.status import read_status
from gateway.cli import main
from gateway.clock.kernel_clock import ClockWatch, boot_id, boottime_us
from gateway.commands import buffer_commands
from gateway.commands.buffer_commands import REQUEST_PAYLOAD_BYTES_MAX, request_parts
from gateway.config import config_file
from gateway.config.config_file import route_table
from gateway.daemon import control
from gateway.intake import routes
from gateway.intake.front_door import FrontDoor
from gateway.kafka import topics
from gateway.reading import Reading
from gateway.record_contract import NAME_RULE
from tests.support.buffers import reading_of
from tests.support.gateways import SLUICE
from tests.support.waiting import patience

CONFIG = """\
[gateway]
id = "gw1"
clock = "system"
[buffer]
path = "{folder}/buffer.db"
[kafka]
bootstrap = ["127.0.0.1:1"]
[[routes]]
topic = "{route}/{{device}}/{{stream}}"
kafka = "device-{{stream}}"
"""
HOSTILE = b'\x1b]0;owned\x07\xff {"t": 1}\n'


def write_config(folder: Path, route: str = "device") -> Path:
    config = folder / "gateway.toml"
    config.write_text(CONFIG.format(folder=folder, route=route))
    return config


def sluice(config: Path, *command: str) -> Result:
    """`sluice buffer COMMAND` in a terminal of 80 columns."""
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, ["buffer", *command, "--config", str(config)])


@dataclass(frozen=True, slots=True)
class Ended:
    exit_code: int
    stdout: str
    stderr: str


async def beside(config: Path, *command: str, told: str = "") -> Ended:
    """Run a command in a process of its own, while this process may be the daemon."""
    process = await asyncio.create_subprocess_exec(
        *(str(SLUICE), "buffer", *command, "--config", str(config)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(told.encode())
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(), errors.decode())


@asynccontextmanager
async def front_door(config: Path) -> AsyncIterator[tuple[FrontDoor, Buffer]]:
    settings = config_file.load(config)
    clock = ClockWatch(settings.gateway)
    buffer = Buffer(settings.buffer, boot_id(), clock.now)
    door = FrontDoor(buffer, route_table(settings), settings.gateway, settings.kafka, boottime_us)
    buffer.open()
    try:
        yield door, buffer
    finally:
        await buffer.close()


@asynccontextmanager
async def daemon(config: Path) -> AsyncIterator[tuple[FrontDoor, Buffer]]:
    """The parts of the daemon that the commands meet: the buffer and the control socket."""
    async with front_door(config) as (door, buffer):
        path = control.socket_path(config.with_name("buffer.db"))
        serving = asyncio.create_task(control.serve(path, control.handlers(door, buffer)))
        try:
            while not path.exists():
                await asyncio.sleep(0.01)
            yield door, buffer
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def reading(topic: str, payload: bytes = b'{"t": 21.5}') -> Reading:
    return reading_of(topic, payload, boottime_us())


async def take(door: FrontDoor, readings: Sequence[Reading]) -> None:
    taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    door.take(readings, taken.set_result)
    assert await asyncio.wait_for(taken, patience(10))


async def fill(config: Path) -> None:
    """Three readings of `42`, one of `kitchen`, two that no route takes, and a loss."""
    async with front_door(config) as (door, _):
        await take(door, [reading("device/42/thermo", b"%d" % number) for number in range(3)])
        await take(door, [reading("device/kitchen/thermo", HOSTILE)])
        await take(door, [reading("shed/7/thermo", b"7"), reading("shed/\x1b[2J", b"\xff")])
        door.lost("42", "buffer-full", 5)


@pytest.fixture
async def config(tmp_path: Path) -> Path:
    """A stopped gateway with something in its buffer."""
    written = write_config(tmp_path)
    await fill(written)
    return written


def words_of(output: str) -> str:
    """The words of an output, wherever its lines end."""
    return " ".join(output.split())


def is_harmless(output: str) -> bool:
    return all(line.isprintable() for line in output.splitlines())


# -- ls -------------------------------------------------------------------------------------------


def put_usage(config: Path, hours: int, readings: int, disk_bytes: int) -> None:
    connection = schema.connect(config.with_name("buffer.db"))
    connection.execute("DELETE FROM usage")
    connection.executemany(
        "INSERT INTO usage (boot_id, hour, seconds, readings, stored_bytes, disk_bytes) VALUES ('b', ?, 3600, ?, ?, ?)",
        [(hour, readings, readings * 35, disk_bytes) for hour in range(hours)],
    )
    connection.close()


def test_ls_of_a_stopped_gateway(config: Path) -> None:
    put_usage(config, 30, 3600, 3600 * 500)
    shown = sluice(config, "ls")
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert "gateway  gw1, not running" in lines
    assert any(line.startswith("waiting  6 rows, the oldest of 20") and line.endswith(" s old") for line in lines)
    assert any(line.endswith("if nothing goes to Kafka, by the last 1 d that sluice ran") for line in lines)
    assert "writes   43.2 MB a day, 500 B a reading, by the last 1 d that sluice ran" in lines
    assert "card     lasts 253.5 years at that rate, if its flash takes" in lines
    assert "lost     5, not reported to Kafka yet" in lines
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[0] == ["DEVICE", "WAITING", "PAYLOAD", "OLDEST", "NEWEST", "(UTC)", "LOST"]
    assert [(line[0], line[1], line[-1]) for line in table[1:]] == [
        ("42", "3", "5"),
        ("(gateway)", "2", "0"),
        ("kitchen", "1", "0"),
    ]
    assert max(map(len, lines)) <= 80
    assert is_harmless(shown.output)


async def test_ls_tells_what_was_lost_of_the_gateways_own_from_what_was_lost_of_nobody_knows_whom(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        door.event("boot", None, version="1")
        door.lost("42", "event-refused", 2)
        door.lost(None, "gateway-events-dropped", 1)
        door.lost(None, "buffer-unreadable", 0)
        door.lost(None, "quarantine-damaged", 4)
    listed = json.loads(sluice(config, "ls", "--json").output)["devices"]
    assert [(of["device"], of["rows"], of["lost"]) for of in listed] == [("", 1, 3), (None, 0, 4)]
    lines = [line.split() for line in sluice(config, "ls").output.splitlines()[-2:]]
    assert [(line[0], line[1], line[-1]) for line in lines] == [("(gateway)", "1", "3"), ("(unknown)", "0", "4")]


def test_ls_says_what_it_does_not_know_yet_and_takes_another_card(config: Path) -> None:
    put_usage(config, 0, 0, 0)
    assert "full     not known yet: told after 10 min of running (0 s so far)" in sluice(config, "ls").output
    put_usage(config, 1, 0, 0)
    assert (
        "full     never at this rate: nothing came in, by the last 1 h that sluice ran" in sluice(config, "ls").output
    )
    put_usage(config, 1, 10, 10**9)
    told = json.loads(
        sluice(config, "ls", "--card-endurance-tbw", "117", "--write-amplification", "1", "--json").output
    )
    assert told["write_budget"]["disk_bytes_per_day"] == 24e9
    assert told["write_budget"]["card_days"] == pytest.approx(117e12 / 24e9)
    assert (told["rows"], told["lost"], told["running"]) == (6, 5, False)
    assert told["hours_until_full"] > 0


def test_ls_tells_where_the_disk_is_the_bound(config: Path) -> None:
    put_usage(config, 1, 10, 10)
    text = config.read_text()
    config.write_text(text.replace("[kafka]", f"free_bytes_min = {2**40}\n[kafka]"))
    shown = sluice(config, "ls").output
    assert "(buffer.free_bytes_min = 1.1 TB)" in shown
    # Free pages in the file are all the room that is left.
    assert "the disk has room for " in shown


async def test_ls_of_a_running_gateway_with_nothing_in_its_buffer(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with daemon(config):
        shown = await asyncio.to_thread(sluice, config, "ls")
    assert shown.exit_code == 0
    assert "gateway  gw1, running\nwaiting  nothing\n" in shown.output


@pytest.mark.parametrize("state", [{}, {"usage": "of another version"}, {"usage": [720.0, 10, 350, 100_000]}])
async def test_ls_counts_what_an_idle_gateway_has_not_written_down(tmp_path: Path, state: dict[str, object]) -> None:
    config = write_config(tmp_path)

    async def answer(_arguments: dict[str, object]) -> object:
        return state

    async with front_door(config):
        path = control.socket_path(config.with_name("buffer.db"))
        serving = asyncio.create_task(control.serve(path, {"state": answer}))
        while not path.exists():
            await asyncio.sleep(0.01)
        shown = (await asyncio.to_thread(sluice, config, "ls")).output
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    counted = "writes   12.0 MB a day, 10.0 kB a reading, by the last 12 min that sluice ran"
    unknown = "writes   not known yet: told after 10 min of running (0 s so far)"
    assert (counted if isinstance(state.get("usage"), list) else unknown) in shown


# -- peek and export ------------------------------------------------------------------------------


def test_peek_shows_the_oldest_or_the_newest_and_no_terminal_obeys_them(config: Path) -> None:
    shown = sluice(config, "peek", "--limit", "2")
    assert [line.split()[2:] for line in shown.output.splitlines()[1:]] == [
        ["42", "device-thermo", "0"],
        ["42", "device-thermo", "1"],
    ]
    newest = sluice(config, "peek", "--device", "kitchen", "--newest")
    assert r'kitchen  device-thermo  \x1b]0;owned\x07\xff {"t": 1}\x0a' in newest.output
    assert is_harmless(newest.output)
    assert max(map(len, newest.output.splitlines())) <= 80
    assert sluice(config, "peek", "--device", "nobody\x1b").output == "nothing waits of device nobody\\x1b\n"
    # As `ls` calls it.
    lost = sluice(config, "peek", "--device", "(gateway)").output
    assert {line.split()[2] for line in lost.splitlines()[1:]} == {"(gateway)"}
    told = json.loads(sluice(config, "peek", "--device", "42", "--json").output)
    assert [reading["payload"] for reading in told] == ["0", "1", "2"]


def forget_the_clock(config: Path, *, of_all: bool = True) -> None:
    """Let no boot's clock ever have been synced; or only not that of one in which quarantined input 2 came."""
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        if of_all:
            connection.execute("UPDATE boot SET error_us = NULL, clock = NULL")
        else:
            connection.execute("INSERT INTO boot (boot_id, offset_us, error_us) VALUES ('earlier', 0, NULL)")
            connection.execute("UPDATE quarantine SET boot_id = 'earlier' WHERE number = 2")


@pytest.mark.parametrize(("command", "header"), [("ls", "NEWEST"), ("peek", "RECEIVED"), ("quarantine ls", "RECEIVED")])
def test_a_time_that_no_clock_tells_is_not_called_utc(command: str, header: str, config: Path) -> None:
    synced = sluice(config, *command.split()).output
    assert f"{header} (UTC)" in synced
    assert "boot + " not in synced
    forget_the_clock(config)
    shown = sluice(config, *command.split()).output
    assert re.search(r"boot \+ [0-9, d]*\d+:\d\d:\d\d  ", shown)
    assert f"  {header}  " in f"  {shown}"
    assert "UTC" not in shown
    assert words_of(shown).endswith(
        " boot + …: counted from a start of this box (not of the sensor) after which the box's clock was never synced"
    )
    assert max(map(len, shown.splitlines())) <= 80


def test_times_of_both_kinds_are_told_apart(config: Path) -> None:
    forget_the_clock(config, of_all=False)
    shown = sluice(config, "quarantine", "ls").output
    assert "  RECEIVED (UTC)  " in shown
    assert "boot + …: counted from a start of this box" in shown


async def test_a_device_that_nothing_waits_of_has_no_time(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        door.lost("42", "buffer-full", 5)
    shown = sluice(config, "ls").output
    assert "  NEWEST  LOST" in shown
    assert "boot + " not in shown


async def test_an_export_of_nothing_says_so_beside_the_lines(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        await take(door, [reading("device/42/thermo")])
    expected = {
        "--device nobody\x1b": "nothing waits of device nobody\\x1b\n",
        "--device (gateway)": "nothing waits of device (gateway)\n",
        "--quarantine": "the quarantine is empty\n",
        "--quarantine --device 42": "the quarantine has nothing of device 42\n",
        "--device 42": "",
    }
    for options, words in expected.items():
        exported = sluice(config, "export", *options.split(" "))
        assert (exported.exit_code, exported.stderr, bool(exported.stdout)) == (0, words, not words)
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        connection.execute("DELETE FROM reading")
    assert sluice(config, "export").stderr == "nothing waits\n"


async def test_export_is_one_json_object_a_line_on_a_running_gateway_too(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    await fill(config)
    stopped = sluice(config, "export", "--device", "42")
    async with daemon(config):
        running = await beside(config, "export", "--device", "42", "--json")
    before, after = ([json.loads(line) for line in text.splitlines()] for text in (stopped.output, running.stdout))
    # The boot's wall clock was read anew in between: it may differ by microseconds.
    walls = {"time", "received_time", "time_error_us"}
    assert [{name: line[name] for name in line.keys() - walls} for line in after] == [
        {name: line[name] for name in line.keys() - walls} for line in before
    ]
    assert [line["payload"] for line in after] == ["0", "1", "2"]


def test_export_of_the_quarantine_has_it_whole(config: Path) -> None:
    lines = [json.loads(line) for line in sluice(config, "export", "--quarantine").output.splitlines()]
    assert [(line["number"], line["reason"], line["topic"]) for line in lines] == [
        (1, "no-route", "shed/7/thermo"),
        (2, "no-route", "shed/\x1b[2J"),
    ]
    assert (lines[0]["payload"], lines[1]["payload_base64"]) == ("7", "/w==")


async def test_a_reader_of_an_export_may_close_the_pipe(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        await take(door, [reading("device/42/thermo", bytes(5_000)) for _ in range(500)])
    command = f"set -o pipefail; {SLUICE} buffer export --config {config} | head -n 1 | wc -l"
    ended = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", command], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "1", "")


def test_a_full_disk_ends_an_export_with_words(config: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [SLUICE, "buffer", "export", "--config", config],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert "the export ends early: No space left on device" in ended.stderr


# -- the quarantine -------------------------------------------------------------------------------


def test_the_quarantine_is_listed(config: Path) -> None:
    shown = sluice(config, "quarantine", "ls")
    assert shown.exit_code == 0
    told, table = shown.output.split("\n\n")
    assert words_of(told) == (
        r'2 no-route, e.g. "\xff": no route takes the topic; add one under [[routes]], or correct the sensor'
        "'s topic (on a serial line: its stream); routes here take device/{device}/{stream} "
        "Once the cause is corrected: sluice buffer quarantine retry --reason REASON"
    )
    assert table.startswith("NUMBER  RECEIVED (UTC)       DEVICE  REASON    SIZE  SUBJECT\n")
    assert r"shed/\x1b[2J" in shown.output
    assert is_harmless(shown.output)
    told = json.loads(sluice(config, "quarantine", "ls", "--json").output)
    assert [(item["number"], item["bytes"], "payload" in item) for item in told] == [(2, 1, False), (1, 1, False)]
    assert json.loads(sluice(config, "quarantine", "ls", "--reason", "other", "--json").output) == []


@pytest.mark.parametrize("columns", ["80", "1000000"], ids=["terminal", "pipe"])
async def test_however_long_its_input_is_the_quarantine_is_listed_in_short(tmp_path: Path, columns: str) -> None:
    config = write_config(tmp_path)
    long, payload = f"shed/{'x' * 60_000}", bytes(60_000)
    async with front_door(config) as (door, _):
        await take(door, [reading_of(long, payload, boottime_us()), reading(f"device/{'y' * 60_000}/thermo", payload)])
        door.unreadable("z" * 60_000, "/dev/ttyUSB0", b"t=1" * 20_000, boottime_us(), f"no-pairs: {'w' * 60_000}")
    listing = ["buffer", "quarantine", "ls", "--config", str(config)]
    told = CliRunner(env={"COLUMNS": columns}).invoke(main, listing).output
    assert len(told) < 5_000
    assert "(60,000 bytes; whole: sluice buffer export --quarantine)" in words_of(told), "of the payload"
    assert "(60,000 characters; whole: sluice buffer export --quarantine)" in words_of(told), "of the sensor's name"
    found = json.loads(sluice(config, "quarantine", "ls", "--json").output)
    assert {len(item["topic"] or "") for item in found} == {0, len(long), len(f"device/{'y' * 60_000}/thermo")}


async def test_the_newest_are_listed_below_an_example_of_each_reason(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    count = buffer_commands.QUARANTINE_ROWS + 5
    async with front_door(config) as (door, _):
        for number in range(count):
            door.unreadable("wrongsep", "/dev/ttyUSB0", b"co2: %d temp: 21.5" % number, boottime_us(), "no-pairs")
        door.unreadable("noise", "/dev/ttyUSB1", b"\x1b[2J" * 100, boottime_us(), "not-text")
        await take(door, [reading_of("shed/scale/text", b"{}", boottime_us(), port="/dev/ttyUSB2")])
    told, table, *_ = sluice(config, "quarantine", "ls").output.split("\n\n")
    assert f'{count} no-pairs, e.g. "co2: {count - 1} temp: 21.5" from wrongsep: no name' in words_of(told)
    assert is_harmless(told)
    _, *lines = table.splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == [*range(count + 2, count + 2 - 20, -1)]
    assert lines[-1] == "and 7 older (--limit N; all: sluice buffer export --quarantine)"
    wide = CliRunner(env={"COLUMNS": "200"}).invoke(
        main, ["buffer", "quarantine", "ls", "--limit", "1", "--config", str(config)]
    )
    assert "  shed/scale/text (/dev/ttyUSB2)\n" in wide.output
    assert "older" not in sluice(config, "quarantine", "ls", "--limit", str(count + 2)).output
    for limit, listed in (((), count + 2), (("--limit", "3"), 3)):
        found = json.loads(sluice(config, "quarantine", "ls", "--json", *limit).output)
        assert [item["number"] for item in found] == [*range(count + 2, count + 2 - listed, -1)]


async def test_the_reasons_are_those_of_what_is_asked_for(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        door.unreadable("roof", "/dev/ttyUSB0", b"co2", boottime_us(), "no-pairs")
        door.unreadable("shed", "/dev/ttyUSB1", b"noise", boottime_us(), "not-text")
        door.unreadable("shed", "/dev/ttyUSB1", b"wrong", boottime_us(), "no-pairs")

    def reasons(*options: str) -> list[str]:
        """With the example of each."""
        shown = sluice(config, "quarantine", "ls", *options).output
        return re.findall(r'(?m)^(\d+ [a-z-]+, e\.g\. "\w+" from \w+)', shown)

    both = ['2 no-pairs, e.g. "wrong" from shed', '1 not-text, e.g. "noise" from shed']
    assert reasons() == both
    assert reasons("--device", "roof") == ['1 no-pairs, e.g. "co2" from roof']
    assert reasons("--reason", "not-text") == both[1:]
    assert reasons("--reason", "no-pairs", "--device", "shed") == ['1 no-pairs, e.g. "wrong" from shed']
    nothing = {
        "--reason nope\x1b": r"the quarantine has nothing for 'nope\x1b'; reasons there: no-pairs, not-text",
        "--device attic": "the quarantine has nothing of device attic",
        "--device roof --reason nope": "the quarantine has nothing of device roof for 'nope'; "
        "reasons of this device: no-pairs",
        "--device attic --reason nope": "the quarantine has nothing of device attic for 'nope'; "
        "reasons of this device: none",
    }
    for options, words in nothing.items():
        shown = sluice(config, "quarantine", "ls", *options.split(" "))
        assert (shown.exit_code, words_of(shown.output)) == (0, words)


async def test_reports_on_the_quarantine_wait_as_the_gateways_own(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        door.unreadable("wrongsep", "/dev/ttyUSB0", b"co2", boottime_us(), "no-pairs")
        await take(door, [reading("device/42/thermo")])
    devices = json.loads(sluice(config, "ls", "--json").output)["devices"]
    assert [(of["device"], of["rows"]) for of in devices] == [("", 1), ("42", 1)]
    assert len(json.loads(sluice(config, "peek", "--device", "(gateway)", "--json").output)) == 1
    assert json.loads(sluice(config, "peek", "--device", "wrongsep", "--json").output) == []


def test_each_reason_that_a_route_or_a_topic_has_is_told_with_what_to_do() -> None:
    sources = [Path(module.__file__ or "").read_text() for module in (routes, topics)]
    reasons = re.findall(
        r'(?:Refusal\(|TopicVerdict\(\s*topic,\s*|UNKNOWN = |NO_ROUTE = |_NAME = )"([a-z-]+)"', "\n".join(sources)
    )
    assert {"no-route", "device-name-too-long", "topic-unknown", "topic-not-logappendtime"} <= set(reasons)
    # Only events are left out of a topic of last readings. No reading is quarantined because of it.
    assert set(reasons) - {"topic-not-compacted"} <= buffer_commands._TO_MEND.keys()


@pytest.mark.parametrize("reason", ["device-name-invalid", "device-name-too-long"])
def test_a_refused_name_is_told_with_the_rule_and_can_be_taken_in_again(config: Path, reason: str) -> None:
    set_aside_for(config, reason, reason)
    shown = words_of(sluice(config, "quarantine", "ls").output)
    assert f"is {NAME_RULE}" in shown
    assert 'a route with this topic and device = "NAME"' in shown
    assert "Once the cause is corrected: sluice buffer quarantine retry" in shown


@pytest.mark.parametrize("reason", ["not-the-writers-device", "salvaged-without-series"])
def test_what_no_retry_can_mend_is_told_as_such(config: Path, reason: str) -> None:
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        connection.execute("UPDATE quarantine SET reason = ? WHERE number = 1", (reason,))
    shown = words_of(sluice(config, "quarantine", "ls").output)
    assert "then drop it" in shown
    assert "Once the cause is corrected: sluice buffer quarantine retry" in shown, "the other input may be mended"
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        connection.execute("UPDATE quarantine SET reason = ?", (reason,))
    assert "retry" not in words_of(sluice(config, "quarantine", "ls").output)


def set_aside_for(config: Path, *reasons: str) -> None:
    """Give the quarantined input, number by number, these reasons."""
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        for number, reason in enumerate(reasons, 1):
            connection.execute("UPDATE quarantine SET reason = ? WHERE number = ?", (reason, number))


def test_what_a_topic_is_the_reason_for_goes_by_itself(config: Path) -> None:
    set_aside_for(config, "topic-compacted", TOPIC_FORBIDDEN)
    shown = words_of(sluice(config, "quarantine", "ls").output)
    told = f"Input quarantined for {TOPIC_FORBIDDEN}, topic-compacted is sent by itself once that is corrected"
    assert told in shown
    assert "quarantine retry" not in shown
    set_aside_for(config, "topic-compacted", "no-route")
    shown = words_of(sluice(config, "quarantine", "ls").output)
    assert "Input quarantined for topic-compacted is sent by itself" in shown
    assert (
        "Once the cause is corrected: sluice buffer quarantine retry --reason REASON (for other reasons than those "
        "below)"
    ) in shown


def test_a_right_to_write_that_is_missing_is_told_as_such(config: Path) -> None:
    set_aside_for(config, TOPIC_FORBIDDEN, "broker-refused: PolicyViolationError")
    shown = words_of(sluice(config, "quarantine", "ls").output)
    assert f'1 {TOPIC_FORBIDDEN}, e.g. "7": the broker does not let this gateway write to the topic' in shown
    assert "(ACL Write)" in shown
    assert r'1 broker-refused: PolicyViolationError, e.g. "\xff": the broker refuses it' in shown


async def test_one_is_told_as_one(config: Path) -> None:
    set_aside_for(config, "no-route", "salvaged-without-series")
    refused = await beside(config, "quarantine", "retry", "1")
    assert "1 message stays in the quarantine: no-route" in words_of(refused.stdout)
    kept = await beside(config, "quarantine", "drop", "1", told="n\n")
    assert "Throw 1 quarantined input away, for good?" in kept.stderr


def test_a_long_reason_is_shown_whole(config: Path) -> None:
    reason = "broker-refused: PolicyViolationError"
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        connection.execute("UPDATE quarantine SET reason = ?", (reason,))
    table = sluice(config, "quarantine", "ls").output.split("\n\n")[1]
    assert table.count(reason) == 2


def test_a_reason_is_shown_whole_where_there_is_room(config: Path) -> None:
    with closing(schema.connect(config.with_name("buffer.db"))) as connection:
        connection.execute(
            "UPDATE quarantine SET reason = 'kafka-topic-name-invalid', subject = 'device/' || hex(zeroblob(40))"
        )
    shown = sluice(config, "quarantine", "ls").output
    assert "  kafka-topic-name-invalid  " in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_empty_quarantine_is_told_as_such(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    schema.connect(tmp_path / "buffer.db").close()
    for command in ("ls", "retry --all", "drop --all"):
        shown = sluice(config, "quarantine", *command.split())
        assert (shown.exit_code, shown.output) == (0, "the quarantine is empty\n")


def mend_the_route(config: Path) -> None:
    write_config(config.parent, route="shed")


def waiting(config: Path, device: str) -> list[str]:
    return [json.loads(line)["payload"] for line in sluice(config, "export", "--device", device).output.splitlines()]


async def test_what_is_mended_is_taken_in_again_on_a_stopped_gateway(config: Path) -> None:
    refused = await beside(config, "quarantine", "retry", "--all")
    assert refused.exit_code == 1
    assert words_of(refused.stdout) == (
        "0 messages taken in again 2 messages stay in the quarantine: no-route: no route takes the "
        "topic; add one under [[routes]], or correct the sensor's topic (on a serial line: its stream)"
        "; routes here take device/{device}/{stream}"
    )
    mend_the_route(config)
    mended = await beside(config, "quarantine", "retry", "1")
    assert mended.exit_code == 0
    assert words_of(mended.stdout) == (
        "1 message taken in again: to Kafka with what waits; what Kafka still refuses comes back into the quarantine"
    )
    assert waiting(config, "7") == ["7"]
    assert [item["number"] for item in json.loads(sluice(config, "quarantine", "ls", "--json").output)] == [2]
    # Its lane was made known, as one of the daemon's is.
    events = [json.loads(line) for line in sluice(config, "export").output.splitlines()]
    assert "sluice.gateway.lane-opened" in [event["type"] for event in events]
    assert sluice(config, "verify").exit_code == 0


async def test_what_is_mended_is_taken_in_again_by_a_running_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several requests for one command.
    monkeypatch.setattr(control, "NUMBERS_MAX", 2)
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        await take(door, [reading(f"shed/{number}/thermo") for number in range(5)])
    mend_the_route(config)
    async with daemon(config) as (_, buffer):
        lane = buffer.lane.name
        ended = await asyncio.to_thread(sluice, config, "quarantine", "retry", "--reason", "no-route", "--json")
        assert json.loads(ended.stdout) == {"stored": 5, "refused": {}, "unknown": 0}
        exported = await asyncio.to_thread(sluice, config, "export", "--device", "3")
        (stored,) = (json.loads(line) for line in exported.output.splitlines())
        assert (stored["lane"], stored["payload"]) == (lane, '{"t": 21.5}')


async def test_a_restart_is_asked_for_where_routes_are_what_is_to_be_mended(config: Path) -> None:
    async with front_door(config) as (door, _):
        door.unreadable("wrongsep", "/dev/ttyUSB0", b"co2", boottime_us(), "not-json")
    restart = "the running gateway has the routes that it was started with: restart it after changing [[routes]]"
    async with daemon(config):
        of_a_line = await beside(config, "quarantine", "retry", "3")
        of_a_route = await beside(config, "quarantine", "retry", "1", "3")
    assert "1 message stays in the quarantine: not-json" in of_a_line.stdout
    assert "routes" not in of_a_line.stdout
    assert restart in of_a_route.stdout
    assert buffer_commands._TO_MEND.keys() >= buffer_commands._OF_ROUTES


@given(st.dictionaries(st.integers(1, 10**6), st.integers(0, 3 * REQUEST_PAYLOAD_BYTES_MAX)))
def test_one_request_takes_in_no_more_than_a_commit_can(chosen: dict[int, int]) -> None:
    parts = request_parts(chosen)
    assert [number for part in parts for number in part] == list(chosen)
    for part in parts:
        assert 0 < len(part) <= control.NUMBERS_MAX
        assert len(part) == 1 or sum(chosen[number] for number in part) <= REQUEST_PAYLOAD_BYTES_MAX


async def test_drop_asks_first_and_drops_for_good(config: Path) -> None:
    kept = await beside(config, "quarantine", "drop", "--all", told="n\n")
    assert kept.exit_code == 1
    assert "Throw 2 quarantined inputs away, for good?" in kept.stderr
    dropped = await beside(config, "quarantine", "drop", "1", told="y\n")
    assert (dropped.exit_code, dropped.stdout) == (0, "1 thrown away, and counted as lost\n")
    async with daemon(config):
        running = await beside(config, "quarantine", "drop", "1", "2", "--yes")
    assert running.exit_code == 1
    again = "1 thrown away, and counted as lost\n1 not found: sluice buffer quarantine ls has the numbers\n"
    assert running.stdout == again
    assert read_status(config.with_name("buffer.db")).losses["quarantine-dropped"] == 2
    assert sluice(config, "quarantine", "ls").output == "the quarantine is empty\n"
    assert sluice(config, "quarantine", "retry", "--all").exit_code == 0


def test_which_input_is_meant_must_be_said_in_one_way(config: Path) -> None:
    for arguments in ([], ["--all", "1"], ["--all", "--reason", "x"], ["0"], ["x"]):
        assert sluice(config, "quarantine", "retry", *arguments).exit_code == 2
        assert sluice(config, "quarantine", "drop", "--yes", *arguments).exit_code == 2
    for mistyped, shown in (("abc", "abc"), ("0", "0"), (str(2**63), str(2**63)), ("\x1b[2J", r"\x1b[2J")):
        words = words_of(sluice(config, "quarantine", "drop", "--yes", mistyped).output)
        assert f"'{shown}' is no NUMBER: sluice buffer quarantine ls has them; for all of one reason: --reason" in words
    mistaken = sluice(config, "quarantine", "drop", "--yes", "--reason", "noroute")
    assert mistaken.exit_code == 1
    assert "the quarantine has nothing for 'noroute'; reasons there: no-route" in mistaken.output


async def test_a_gateway_that_cannot_be_asked_is_not_gone_behind(config: Path) -> None:
    async with front_door(config):
        # It runs, and has no control socket.
        ended = await beside(config, "quarantine", "drop", "--all", "--yes")
    assert ended.exit_code == 1
    assert "although a gateway has the buffer open" in ended.stderr
    assert len(json.loads(sluice(config, "quarantine", "ls", "--json").output)) == 2


# -- verify and wrong usage -----------------------------------------------------------------------


async def test_verify_of_a_running_gateway_and_of_a_broken_file(config: Path) -> None:
    async with daemon(config):
        running = await beside(config, "verify", "--full")
    assert running.exit_code == 0
    assert "FAIL" not in running.stdout
    assert running.stdout.startswith("ok    schema: version")
    connection = schema.connect(config.with_name("buffer.db"))
    connection.execute("DELETE FROM reading WHERE sequence = 1")
    connection.close()
    broken = sluice(config, "verify")
    assert broken.exit_code == 1
    assert "FAIL  lane " in broken.output
    assert "missing between rows that are there: 1 sequence number (1 to 1)" in " ".join(broken.output.split())
    assert max(map(len, broken.output.splitlines())) <= 80
    told = json.loads(sluice(config, "verify", "--json").output)
    assert [verdict["ok"] for verdict in told].count(False) == 1


async def test_verify_tells_what_sqlite_finds_on_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with front_door(config) as (door, _):
        await take(door, [reading("device/42/thermo", bytes(3_000)) for _ in range(100)])
    path = config.with_name("buffer.db")
    connection = schema.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.close()
    with path.open("r+b") as file:
        for page in (pages - 4, pages - 2):
            file.seek(page * 4096)
            file.write(b"\xff" * 8)
    (words,) = (v["words"] for v in json.loads(sluice(config, "verify", "--json").output) if not v["ok"])
    assert "finds damage: " in words
    assert words.casefold().count("page ") >= 2
    assert words.isprintable()
    assert "\\x0a" not in sluice(config, "verify").output


READING = ["ls", "peek", "export", "verify", "quarantine ls"]
WRITING = ["quarantine retry --all", "quarantine drop --all"]


@pytest.mark.parametrize("command", READING + WRITING)
def test_before_the_first_start_there_is_nothing_to_look_into(command: str, tmp_path: Path) -> None:
    shown = sluice(write_config(tmp_path), *command.split())
    assert shown.exit_code == 1
    assert "there is no buffer at" in shown.output
    assert "sluice run makes it" in words_of(shown.output)


@pytest.mark.parametrize("command", READING + WRITING)
def test_wrong_usage_is_exit_code_2(command: str, tmp_path: Path) -> None:
    missing = sluice(tmp_path / "none.toml", *command.split())
    assert missing.exit_code == 2
    assert "nothing was done: correct this first" in missing.output
    assert sluice(write_config(tmp_path), *command.split(), "--nonsense").exit_code == 2


@pytest.mark.parametrize("command", READING)
def test_looking_changes_no_row(command: str, config: Path) -> None:
    before = dump(config)
    assert sluice(config, *command.split()).exit_code == 0
    assert dump(config) == before


def dump(config: Path) -> list[str]:
    connection = schema.connect(config.with_name("buffer.db"))
    try:
        return list(connection.iterdump())
    finally:
        connection.close()
