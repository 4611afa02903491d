"""The pages are true: commands, settings, examples, headers, events, reasons and packages are as the code has them."""

import ast
import configparser
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner
from msgspec import structs

from gateway import settings
from gateway.buffer.losses import OWN_LOSSES, UNCLEAN_END, _Reported
from gateway.buffer.quarantine import DROPPED, OVERFLOW
from gateway.buffer.shares import ABOVE_SHARE
from gateway.cli import main
from gateway.commands.buffer_commands import _UNREADABLE_LINES
from gateway.config import config_file
from gateway.intake import payload_identity, payload_time
from gateway.intake.routes import Destination
from gateway.kafka.record import DOUBTS
from gateway.kafka.topics import ADMIN_CONFIG
from gateway.reading import SENSOR_DROPPED
from gateway.record_contract import DEVICE, HEADER_NAMES, NAME_RULE, TIME_ERROR_UNKNOWN_US
from gateway.serial_lines.text_lines import TOO_LONG
from gateway.settings import DEFAULT_CONFIG
from spark.cli import main as cloud
from tests.support import generated_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
EVENTS = DOCS / "kafka-records.md"
PAYLOADS = DOCS / "payloads.md"


SLUICE = list(generated_pages.commands(main, "sluice"))
ALL = [*SLUICE, *generated_pages.commands(cloud, "sluice-cloud")]
by_name = pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
of_gateway = pytest.mark.parametrize(("path", "command"), SLUICE, ids=[" ".join(path) for path, _ in SLUICE])


def options(command: click.Command) -> dict[str, click.Option]:
    """Its options by their long names."""
    return {
        name: parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--")
    }


def told_commands() -> set[tuple[str, ...]]:
    """Commands that pages call, as far as they are words: `sluice buffer ls` in code, not what follows it."""
    code = [found for page in PAGES for found in re.findall(r"`+[^`]+`+", page.read_text())]
    called = re.findall(r"(?:^|[\s`])(sluice(?:-cloud)?(?: [a-z]+)+)", "\n".join(code))
    return {tuple(words.split()) for words in called}


@pytest.mark.parametrize(
    ("page", "made"), [("settings.md", generated_pages.settings_page), ("commands.md", generated_pages.commands_page)]
)
def test_pages_that_follow_from_the_code_are_as_it_says(page: str, made: Callable[[], str]) -> None:
    assert (DOCS / page).read_text() == made(), "run make docs"


def test_the_page_of_commands_has_each() -> None:
    titles = re.findall(r"(?m)^### `([a-z -]+[a-z])", (DOCS / "commands.md").read_text())
    assert titles == [" ".join(path) for path, _ in ALL]


def test_the_operators_page_says_which_settings_commands_read() -> None:
    words = f"Every command reads `{DEFAULT_CONFIG}`, or what `--config PATH` names."
    assert (DOCS / "operate.md").read_text().count(words) == 1


def test_no_page_tells_of_a_command_that_is_not_there() -> None:
    # Words may follow a command (`sluice buffer peek and ...` is none of ours); what it begins with must be there.
    known = {path for path, _ in ALL}
    groups = {path[:length] for path in known for length in range(1, len(path))}
    for told in told_commands():
        beginnings = {told[:length] for length in range(1, len(told) + 1)}
        assert beginnings & known or told in groups, " ".join(told)


@pytest.mark.parametrize(
    "page", [ROOT / "ARCHITECTURE.md", *PAGES, *(DOCS / "decisions").glob("*.md")], ids=lambda page: page.name
)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for place, title in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]+))?\)", page.read_text()):
        target = page.parent / place if place else page
        assert target.exists(), f"{page.name} links to {place}"
        if title:
            assert title in titles_of(target), f"{page.name} links to {place}#{title}"


def titles_of(page: Path) -> set[str]:
    """Titles as GitHub links to them."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_one_screen_for_a_stranger() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 160


@by_name
def test_help_tells_of_every_command_and_option(path: tuple[str, ...], command: click.Command) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(main if path[0] == "sluice" else cloud, [*path[1:], "--help"])
    assert shown.exit_code == 0
    assert command.help
    for name, option in options(command).items():
        assert option.help, f"{' '.join(path)} {name} has no help text"
        assert name in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80


@of_gateway
def test_the_example_in_the_help_can_be_called(
    path: tuple[str, ...], command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.epilog is not None
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.epilog.removeprefix("Example: ").partition(" > ")[0])
    assert tuple(words[: len(path)]) == path
    # Parsing fails on what is not there; nothing is run.
    for word in words:
        if word.endswith(".deb"):
            Path(word).touch()
    command.make_context(path[-1], words[len(path) :])


BOOTSTRAP = '[kafka]\nbootstrap = ["kafka.example:9093"]'
"""What an example of `[kafka]` leaves out."""


def toml_of(page: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_installers_examples_are_settings(tmp_path: Path) -> None:
    whole = toml_of("install.md")[0]
    uplink, own_topics = toml_of("kafka.md")
    names, broker = toml_of("mqtt.md")
    path = tmp_path / "gateway.toml"
    path.write_text(whole)
    settings = config_file.load(path)
    assert settings.mqtt_listener is not None
    assert settings.mqtt_listener.tls is not None
    path.write_text(whole + broker)
    (found,) = config_file.load(path).mqtt_brokers
    assert found.tls is not None
    path.write_text('[gateway]\nid = "barn-1"\n' + re.sub("(?m)^# (?=[a-z_]+ =)", "", uplink))
    kafka = config_file.load(path).kafka
    assert kafka.sasl is not None
    assert kafka.tls is not None
    assert kafka.backlog_topic == "{topic}.backlog"
    (events,) = toml_of("consumers.md")
    path.write_text(
        f'[gateway]\nid = "barn-1"\n{re.sub("(?m)^# (?=[a-z_]+ =)", "", events)}'.replace("[kafka]", BOOTSTRAP)
    )
    settings = config_file.load(path)
    assert [route.envelope for route in settings.routes] == ["both"]
    assert (settings.kafka.structured_topic, settings.kafka.latest_topic) == ("structured-{topic}", "latest-{topic}")
    own = textwrap.dedent(own_topics).replace("[kafka]", BOOTSTRAP)
    path.write_text('[gateway]\nid = "barn-1"\n' + own)
    settings = config_file.load(path)
    topics = (*(route.kafka for route in settings.routes), settings.kafka.events_topic, settings.kafka.quarantine_topic)
    assert all(topic.startswith("site7.") for topic in topics)
    path.write_text(whole + broker + names)
    routes = config_file.route_table(config_file.load(path))
    section = (DOCS / "mqtt.md").read_text().partition("## Names of devices\n")[2].partition("\n## ")[0]
    for topic, device in {
        "zigbee2mqtt/Living room": "living-room",
        "zigbee2mqtt/Wohnzimmer Lampe": "x--Wohnzimmer-20-Lampe",
        "zigbee2mqtt/aa:bb:cc:dd:ee:ff": "x--aa-3A-bb-3A-cc-3A-dd-3A-ee-3A-ff",
        "site/north/42/thermo": "north/42",
    }.items():
        found_at = routes.resolve(topic, None)
        assert isinstance(found_at, Destination)
        assert found_at.device == device
        assert device in section
    # One rule in all places: here its characters are set as code.
    assert NAME_RULE.replace("'", "`").replace(", starting with", ", and starts with") in " ".join(section.split())


def test_the_examples_of_payloads_are_what_the_page_says() -> None:
    page = PAYLOADS.read_text()
    identity, senml, timestamp = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    cbor, binary = (bytes.fromhex(found) for found in re.findall(r"```\n([0-9a-f ]+)\n```", page))
    expected = payload_identity.Identity("7-1a2b3c4d", 123, 456789)
    for layout, payload in (("json", identity.encode()), ("cbor", cbor), ("binary", binary)):
        read = payload_identity.reader(layout)  # type: ignore[arg-type]
        assert read is not None
        assert read(payload) == expected
    assert len(cbor) == int(re.findall(r"(\d+) bytes in hexadecimal", page)[0])
    assert binary[payload_identity.BINARY.size :] == b"21.53"
    told = payload_time.Told(1_795_348_810_000_000, is_relative=False)
    assert payload_time.of_senml_json(senml.encode()) == payload_time.of_timestamp_json(timestamp.encode()) == told
    for sources in (get_args(settings.TimeSource), get_args(settings.PayloadIdentity)):
        assert not {name for name in sources if f'"{name}"' not in page} - {"none"}


def test_every_event_and_every_reason_is_in_the_page_about_them() -> None:
    page = EVENTS.read_text()
    code = "\n".join(module.read_text() for module in (ROOT / "gateway").rglob("*.py"))
    kinds = set(re.findall(r"event(?:_entry)?\(\s*\"([a-z-]+)\"", code)) | set(
        re.findall(r"report\(\"([a-z-]+)\"", code)
    )
    assert {"boot", "lane-closed", "loss", "address-changed"} <= kinds
    assert not {kind for kind in kinds | {"heartbeat"} if f"`{kind}`" not in page}
    verdicts = (ROOT / "gateway" / "kafka" / "topics.py").read_text() + (
        ROOT / "gateway" / "intake" / "routes.py"
    ).read_text()
    reasons = set(re.findall(r"\"((?:topic|no|ambiguous|not-the|device-name|kafka-topic)-[a-z-]+)\"", verdicts))
    assert {"topic-compacted", "no-route"} <= reasons
    lines = "".join(
        (ROOT / "gateway" / "serial_lines" / name).read_text() for name in ("text_formats.py", "text_lines.py")
    )
    formats = "".join(module.read_text() for module in (ROOT / "gateway" / "formats").glob("*.py"))
    unreadable = {*re.findall(r"LineError\(\"([a-z-]+)\"\)", lines), TOO_LONG}
    unreadable |= set(re.findall(r"(?m)^[A-Z_]+: Final = \"([a-z]+-[a-z-]+)\"$", formats))
    assert unreadable == set(_UNREADABLE_LINES)
    assert not {reason for reason in reasons | unreadable if f"`{reason}`" not in page}


def test_every_header_and_what_stands_in_it_is_in_the_page_about_them() -> None:
    page = EVENTS.read_text()
    first, *_ = page.partition("## `gateway-events`")
    told = re.findall(r"`((?:ce_[a-z]+|content-type))`", "".join(re.findall(r"(?m)^\|([^|]*)\|", first)))
    assert tuple(told) == HEADER_NAMES, "in the order on the wire"
    for word in (*DOUBTS.values(), "synced", "estimated", DEVICE, "received", "bounded", str(TIME_ERROR_UNKNOWN_US)):
        assert word in first


def test_every_reason_of_a_loss_is_in_the_page_about_them() -> None:
    code = "\n".join(module.read_text() for module in (ROOT / "gateway").rglob("*.py"))
    reasons = set(re.findall(r"\.lost\(\s*[A-Za-z._]+,\s*\"([a-z0-9-]+)\"|_drop_front\(\"([a-z-]+)\"", code))
    found = {reason for pair in reasons for reason in pair if reason} | {OVERFLOW, DROPPED, SENSOR_DROPPED} | OWN_LOSSES
    found |= {*_UNREADABLE_LINES, ABOVE_SHARE, UNCLEAN_END}
    found |= {f"{what}-{how}" for what in ("buffer", "quarantine") for how in ("damaged", "unreadable")}
    assert {"refused-qos0", "sensor-ring-overflow", "will-not-reported", "too-old", "buffer-full"} <= found
    _, _, after = EVENTS.read_text().partition("### What is lost, and why")
    table = set(re.findall(r"`([a-z0-9-]+)`", "".join(re.findall(r"(?m)^\|([^|]*)\|", after.partition("###")[0]))))
    assert table == found | {"reason"}


def test_the_page_names_each_field_of_a_loss_a_heartbeat_and_a_will() -> None:
    page = EVENTS.read_text()
    loss = {field.name for field in structs.fields(_Reported)}
    will = set(
        re.findall(r"details\[\"([a-z_0-9]+)\"\]", (ROOT / "gateway" / "listener" / "device_events.py").read_text())
    )
    heartbeat = set(
        re.findall(r"(?m)^            \"([a-z_]+)\": ", (ROOT / "gateway" / "uplink" / "heartbeat.py").read_text())
    )
    assert {"will_topic", "will_payload"} <= will
    assert {"offsets", "low_watermark", "counts"} <= heartbeat
    assert not {field for field in loss | will | heartbeat if f"`{field}`" not in page}


@pytest.mark.parametrize(("name", "pause_s"), [("sluice", "5"), ("sluice-ingest", "15")])
def test_the_unit_starts_again_for_ever_and_holds_nothing_that_systemd_does_not_read(name: str, pause_s: str) -> None:
    unit = (ROOT / "systemd" / f"{name}.service").read_text()
    parsed = configparser.RawConfigParser(strict=False)
    parsed.read_string(unit)
    assert parsed["Unit"]["StartLimitIntervalSec"] == "0"
    assert (parsed["Service"]["Restart"], parsed["Service"]["RestartSec"]) == ("always", pause_s)
    # systemd takes a comment on a line of its own only (systemd.syntax(7)).
    assert not [line for line in unit.splitlines() if "#" in line[1:]]


def test_the_rights_that_the_gateway_needs_are_given_by_the_installers_commands() -> None:
    page = (DOCS / "kafka.md").read_text().replace("\\\n", "")
    *commands, own_topics = re.findall(r"(?m)^ *(kafka-acls\.sh .*)$", page)
    assert len(commands) == 2
    for command in (*commands, own_topics):
        assert set(re.findall(r"--operation (\w+)", command)) == {"Write", "DescribeConfigs", "Create"}
        assert ADMIN_CONFIG in command
    assert set(re.findall(r"--topic (\S+)", " ".join(commands))) == {"gateway-events", "gateway-quarantine", "device-"}
    assert re.findall(r"--topic (\S+)", own_topics) == ["site7."]


def test_the_map_names_every_package_by_its_own_words_and_no_file_that_is_gone() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for packages in ("gateway", "spark"):
        _, _, table = text.partition(f"| {packages}/ | |\n")
        lines = dict(re.findall(r"(?m)^\| `([a-z_]+)/` \| (.*) \|$", table.partition("\n\n")[0]))
        assert lines == {
            package.parent.name: ast.get_docstring(ast.parse(package.read_text()))
            for package in (ROOT / packages).glob("*/__init__.py")
        }
    named = re.findall(r"`((?:[a-z_-]+/)+(?:[a-z0-9_]+\.py)?)`", text)
    assert not [path for path in named if not (ROOT / path).exists() and path.count("/") > 1]
