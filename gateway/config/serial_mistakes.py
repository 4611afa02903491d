"""Finds mistakes in `[serial]` that its settings make together, if each alone is right."""

from collections.abc import Iterator
from typing import Final

from gateway.serial_lines.kinds import KINDS, devices, sections
from gateway.settings import SerialSettings
from gateway.toml_files.mistakes import Place, show, spell

SERIAL_EXAMPLES: Final = {
    ("serial", kind.name, *setting): words for kind in KINDS for setting, words in kind.examples.items()
} | {
    ("serial", kind.name, "port"): '; write port = "/dev/ttyUSB0", or a name of /dev/serial/by-path that stays with '
    "the socket"
    for kind in KINDS
}
"""Words for a missing setting, by its section and name."""
_DEFAULTS: Final = SerialSettings()


def serial_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    """Yield every mistake, with its place in the file."""
    for variable in ("{device}", "{stream}"):
        if serial.topic.count(variable) != 1:
            yield ("serial", "topic"), f"must hold {variable} once, as in 'device/{{device}}/{{stream}}'"
    for pattern in serial.ports:
        if pattern != "all" and not pattern.startswith("/"):
            wanted = 'write the whole path, such as "/dev/ttyUSB0" or "/dev/ttyUSB*", or "all" for every USB adapter'
            yield ("serial", "ports"), f"{show(pattern)} is no path; {wanted}"
    if not serial.ports:
        yield from _idle_mistakes(serial)
    yield from _port_mistakes(serial)
    yield from _device_mistakes(serial)
    for section in sections(serial):
        yield from section.kind.mistakes(section.settings, section.place)


def _idle_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    """Find settings that would do nothing without a port of `ports`, if they differ from their defaults."""
    for name in ("baud", "probe_interval_s", "oscillator"):
        if getattr(serial, name) != getattr(_DEFAULTS, name):
            # Each line of these kinds has a baud of its own, and most have one that is not the default.
            *first, last = (kind.header for kind in KINDS)
            below = f", or write it below {', '.join(first)} or {last}" if name == "baud" else ""
            told = "is for sensors with our frames, and serial.ports names no port of theirs"
            yield ("serial", name), f"{told}; remove it, or write ports{below}"


def serial_elsewhere(place: Place, key: str) -> str:
    """Say where a setting belongs that stands in another section of its kind of line; empty if unknown."""
    return next((kind.elsewhere.get(key, "") for kind in KINDS if place[1:2] == (kind.name,)), "")


def serial_instead(place: Place, value: object) -> str:
    """Say what to write for a value that other programs have there; empty if unknown."""
    found = (kind.instead[str(place[-1])] for kind in KINDS if place[1:2] == (kind.name,) and place[-1] in kind.instead)
    return next((words(value) for words in found), "")


def _port_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    """Check the ports of lines that do not speak Sluice's frames: each is one port, and has one reader."""
    first: dict[str, Place] = {}
    for section in sections(serial):
        port, place = section.settings.port, (*section.place, "port")
        if not port.startswith("/"):
            what = "names every adapter, and this is one line" if port == "all" else "is no path"
            yield place, f'{show(port)} {what}; write the path of one port, such as "/dev/ttyUSB0"'
            continue
        other = first.setdefault(port, section.place)
        if other != section.place:
            instead = section.kind.same_port if section.kind.name in other else "write another"
            yield place, f"{show(port)} is {spell(other)}.port too, and a port has one reader; {instead}"


def _device_mistakes(serial: SerialSettings) -> Iterator[tuple[Place, str]]:
    first: dict[str, Place] = {}
    for place, device, _ in devices(serial):
        other = first.setdefault(device, place)
        if other != place:
            mixed = "and the readings of both would be one sensor's; write another name"
            yield (*place, "device"), f"{show(device)} is {spell(other)}.device too, {mixed}"
