"""`[status_page]` in the settings, and the name that the page is found by."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gateway.config.config_file import parse
from gateway.settings import StatusPageSettings
from gateway.toml_files.mistakes import ConfigError

GOOD = """\
[gateway]
id = "barn-1"
[kafka]
bootstrap = ["kafka.example:9092"]
[mqtt_listener]
port = 1883
anonymous = true
[mqtt_listener.tls]
certificate = "/c.pem"
key = "/k.pem"
[status_page]
"""
AVAHI = Path(__file__).parents[3] / "systemd" / "sluice.avahi.service"


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        parse(text, Path("gateway.toml"))
    return [f"{mistake.line}: {mistake.message}" for mistake in raised.value.mistakes]


def test_a_page_needs_no_more_than_its_section() -> None:
    assert parse(GOOD, Path("gateway.toml")).status_page == StatusPageSettings()
    assert parse(GOOD.replace("[status_page]\n", ""), Path("gateway.toml")).status_page is None


@pytest.mark.parametrize(
    ("port", "whose"),
    [(1883, "mqtt_listener.port"), (8883, "mqtt_listener.tls.port, as nothing else is written there")],
)
def test_a_port_that_sensors_have_is_no_port_for_the_page(port: int, whose: str) -> None:
    told = f"12: status_page.port: {port} is {whose}; write another, such as 8080"
    assert mistakes(f"{GOOD}port = {port}\n") == [told]


def test_ports_that_clash_are_told_where_that_is_written_with_one_that_is_free() -> None:
    plain = GOOD.replace("port = 1883", "port = 8080")
    assert mistakes(plain) == [
        "6: mqtt_listener.port: 8080 is status_page.port, as nothing else is written there; write another, such as 1883"
    ]
    assert mistakes(f"{plain}port = 8080\n") == [
        "12: status_page.port: 8080 is mqtt_listener.port; write another, such as 8081"
    ]
    tls = GOOD.replace("port = 1883", "port = 8883")
    (told,) = mistakes(tls)
    assert told.startswith("6: mqtt_listener.port: 8883 is mqtt_listener.tls.port, as nothing else is written there; ")
    assert told.endswith("; write another, such as 1883")
    assert mistakes(tls.replace("tls]", "tls]\nport = 8883")) == [
        "9: mqtt_listener.tls.port: 8883 is mqtt_listener.port; write another, such as 8884"
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('host = ""', "which would listen on every network"),
        ('host = "[::1]"', "::1"),
        ('host = "a..b"', "no host can be called so"),
        ("port = 0", "a TCP port, 1 to 65535"),
        ("history_devices_max = 0", "devices, 1 to 10000"),
        ('password = "x"', "there is no such setting"),
    ],
)
def test_what_will_not_do_is_told_with_its_line(line: str, told: str) -> None:
    (mistake,) = mistakes(f"{GOOD}{line}\n")
    assert mistake.startswith("12: status_page.")
    assert told in mistake


def test_the_page_is_announced_on_its_port() -> None:
    """Avahi announces it. Avahi's own DTD is not needed for this."""
    text = re.sub(r"<!DOCTYPE[^>]*>", "", AVAHI.read_text())
    group = ET.fromstring(text)  # noqa: S314 - a file of ours
    assert group.tag == "service-group"
    assert group.findtext("name") == "Sluice on %h"
    assert group.find("name").get("replace-wildcards") == "yes"  # type: ignore[union-attr]
    assert group.findtext("service/type") == "_http._tcp"
    assert group.findtext("service/port") == str(StatusPageSettings().port)
