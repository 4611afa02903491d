import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.demo_settings import BEFORE_S_MIN, DemoSettings, DemoSettingsError, demo_settings
from demo.gateway_config import render_gateway_config
from gateway.config.config_file import parse, route_table
from gateway.intake.routes import Destination


def test_without_a_word_it_is_the_demo_of_the_readme() -> None:
    assert demo_settings({}) == DemoSettings(60, 20, 200, 4, 2, kill=False)


def test_a_shorter_run_has_a_shorter_outage() -> None:
    assert demo_settings({"DEMO_SECONDS": "30"}).outage_seconds == 10


def test_every_setting_is_read() -> None:
    environment = {
        "DEMO_SECONDS": "40",
        "DEMO_OUTAGE_SECONDS": "12",
        "DEMO_SENSORS": "5",
        "DEMO_SERIAL_SENSORS": "1",
        "DEMO_WIFI_SENSORS": "3",
        "DEMO_KILL": "1",
    }
    settings = demo_settings(environment)
    assert settings == DemoSettings(40, 12, 5, 1, 3, kill=True)
    assert settings.before_s == 14
    fleet = {"FLEET": "20", "DEMO_STEP": "10", "DEMO_TRIAL_S": "60", "DEMO_MISTAKE": "sensors"}
    assert demo_settings(environment | fleet) == replace(settings, fleet=20, step=10, trial_s=60, mistake="sensors")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DEMO_SECONDS": "soon"}, "DEMO_SECONDS=soon: write a whole number from 15 to 3600"),
        ({"DEMO_SENSORS": "-1"}, "DEMO_SENSORS=-1: write a whole number"),
        ({"FLEET": "101"}, "FLEET=101: write a whole number from 0 to 100"),
        ({"DEMO_MISTAKE": "all"}, "DEMO_MISTAKE=all: write uplink or sensors"),
        ({"DEMO_KILL": "yes"}, "DEMO_KILL=yes: write a whole number from 0 to 1"),
        ({"DEMO_SECONDS": "20", "DEMO_OUTAGE_SECONDS": "15"}, "write at most 10, or DEMO_SECONDS=25"),
        ({"DEMO_SECONDS": "20", "DEMO_KILL": "1"}, "write DEMO_OUTAGE_SECONDS=8 or more"),
        ({"DEMO_SENSORS": "0", "DEMO_SERIAL_SENSORS": "0", "DEMO_WIFI_SENSORS": "0"}, "nobody who measures"),
    ],
)
def test_a_wrong_setting_is_told_with_what_to_write(environment: dict[str, str], words: str) -> None:
    with pytest.raises(DemoSettingsError, match=words):
        demo_settings(environment)


def test_all_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(DemoSettingsError, match=r"DEMO_SECONDS=x.*\n.*DEMO_SENSORS=y"):
        demo_settings({"DEMO_SECONDS": "x", "DEMO_SENSORS": "y"})


names = st.sampled_from(
    [
        "DEMO_SECONDS",
        "DEMO_OUTAGE_SECONDS",
        "DEMO_SENSORS",
        "DEMO_SERIAL_SENSORS",
        "DEMO_WIFI_SENSORS",
        "DEMO_KILL",
    ]
)


@given(st.dictionaries(names, st.one_of(st.text(max_size=6), st.integers(-5, 5_000).map(str))))
def test_accepted_demo_settings_can_be_run(environment: dict[str, str]) -> None:
    try:
        settings = demo_settings(environment)
    except DemoSettingsError:
        return
    assert settings.before_s >= BEFORE_S_MIN
    assert settings.outage_seconds > 0
    assert settings.sensors + settings.boards > 0


def test_a_wrong_setting_ends_the_command_with_2_before_anything_starts(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "demo"],
        env={**os.environ, "DEMO_SECONDS": "1", "PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "DEMO_SECONDS=1: write a whole number from 15 to 3600" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_gateway_template_is_a_valid_configuration() -> None:
    text = render_gateway_config(
        buffer=Path("/somewhere/buffer.db"),
        mqtt_port=18830,
        serial_ports="/somewhere/avr/*",
        bootstrap="127.0.0.1:9092",
    )
    settings = parse(text, Path("gateway.toml"))
    assert settings.mqtt_listener is not None
    assert settings.serial is not None
    assert settings.mqtt_listener.port == 18830
    assert settings.serial.ports == ("/somewhere/avr/*",)
    assert settings.kafka.bootstrap == ("127.0.0.1:9092",)
    assert settings.kafka.create_topics
    routes = route_table(settings)
    fleet = Destination("device-thermo", "t-1", "application/json", "json", "auto", 1_000_000, "rc")
    board = Destination("device-thermo", "avr-1", "application/json", "none", "auto", 1_000_000, "rc")
    assert routes.resolve("device/t-1/thermo", None) == fleet
    assert routes.resolve("serial/avr-1/thermo", None) == board
