"""Reads the size of the demo from the environment: `make demo DEMO_SECONDS=120`."""

from collections.abc import Mapping
from dataclasses import dataclass

BEFORE_S_MIN = 5
"""Least seconds that the sensors run before the outage, and after it: else there is nothing to compare."""
KILL_OUTAGE_S_MIN = 8
"""Seconds of outage in which there is time to kill the daemon and to start it again."""
MISTAKES = ("uplink", "sensors")
FLEET_MAX = 100
"""Gateways on one machine: each takes some 50 MB, and a moment of a processor whenever it starts."""


class DemoSettingsError(ValueError):
    """Settings are wrong. The message has one line for each, with what to write instead."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Size of a run."""

    seconds: int
    """Seconds for which the sensors measure."""
    outage_seconds: int
    """Seconds for which the uplink is cut, in the middle of `seconds`."""
    sensors: int
    """MQTT sensors of the fleet."""
    serial_sensors: int
    """AVR boards on serial lines."""
    wifi_sensors: int
    """AVR boards that speak MQTT through a modem."""
    kill: bool
    """Whether the daemon is ended by `kill -9` in the outage and started again."""
    fleet: int = 0
    """Gateways of the demo of many gateways, which takes changes to them; 0 for the demo of one gateway."""
    step: int = 45
    """Per cent of the gateways by which a share of the fleet is raised."""
    trial_s: int = 30
    """Seconds in which a change has to be found good on a gateway of the fleet."""
    mistake: str = "uplink"
    """What the bad change breaks: one of `MISTAKES`."""

    @property
    def boards(self) -> int:
        """AVR boards of both kinds."""
        return self.serial_sensors + self.wifi_sensors

    @property
    def before_s(self) -> float:
        """Seconds that the sensors run before the outage."""
        return (self.seconds - self.outage_seconds) / 2

    def in_words(self) -> str:
        """Say what is going to happen."""
        if self.fleet:
            killed = "; gateways and their looks at the folder are killed meanwhile" if self.kill else ""
            return f"a fleet of {self.fleet} gateways, and two changes for it: a good one and a bad one{killed}"
        killed = ", with the gateway killed in it" if self.kill else ""
        return (
            f"{self.serial_sensors} AVR boards on serial lines, {self.wifi_sensors} on MQTT and a fleet of "
            f"{self.sensors} MQTT sensors for {self.seconds} s, "
            f"{self.outage_seconds} s of them without a path to Kafka{killed}"
        )


def demo_settings(environment: Mapping[str, str]) -> DemoSettings:
    """Read the settings.

    Raises:
        DemoSettingsError: names every wrong setting.
    """
    wrong: list[str] = []

    def number(name: str, default: int, lowest: int, highest: int) -> int:
        text = environment.get(name, "").strip()
        if not text:
            return default
        if not text.isascii() or not text.isdecimal() or not lowest <= int(text) <= highest:
            wrong.append(f"{name}={text}: write a whole number from {lowest} to {highest} (default {default}).")
            return default
        return int(text)

    seconds = number("DEMO_SECONDS", 60, 15, 3_600)
    # 20 s of 60; a shorter run keeps the proportion.
    outage_default = min(20, seconds // 3)
    outage_seconds = number("DEMO_OUTAGE_SECONDS", outage_default, 1, 3_600)
    sensors = number("DEMO_SENSORS", 200, 0, 4_000)
    serial_sensors = number("DEMO_SERIAL_SENSORS", 4, 0, 64)
    wifi_sensors = number("DEMO_WIFI_SENSORS", 2, 0, 64)
    kill = bool(number("DEMO_KILL", 0, 0, 1))
    fleet = number("FLEET", 0, 0, FLEET_MAX)
    step = number("DEMO_STEP", 45, 1, 100)
    trial_s = number("DEMO_TRIAL_S", 30, 10, 300)
    mistake = environment.get("DEMO_MISTAKE", "").strip() or MISTAKES[0]
    if mistake not in MISTAKES:
        wrong.append(f"DEMO_MISTAKE={mistake}: write {' or '.join(MISTAKES)} (default {MISTAKES[0]}).")
    if outage_seconds > seconds - 2 * BEFORE_S_MIN:
        wrong.append(
            f"DEMO_OUTAGE_SECONDS={outage_seconds} leaves less than {BEFORE_S_MIN} s before and after the outage: "
            f"write at most {seconds - 2 * BEFORE_S_MIN}, or DEMO_SECONDS={outage_seconds + 2 * BEFORE_S_MIN}."
        )
    if kill and outage_seconds < KILL_OUTAGE_S_MIN:
        wrong.append(
            f"DEMO_KILL=1 kills and restarts the daemon while the uplink is cut, which takes an outage of "
            f"{KILL_OUTAGE_S_MIN} s: write DEMO_OUTAGE_SECONDS={KILL_OUTAGE_S_MIN} or more."
        )
    if sensors + serial_sensors + wifi_sensors == 0:
        wrong.append(
            "DEMO_SENSORS=0, DEMO_SERIAL_SENSORS=0 and DEMO_WIFI_SENSORS=0 leave nobody who measures: "
            "raise one of them."
        )
    if wrong:
        raise DemoSettingsError("\n".join(wrong))
    return DemoSettings(
        seconds, outage_seconds, sensors, serial_sensors, wifi_sensors, kill, fleet, step, trial_s, mistake
    )
