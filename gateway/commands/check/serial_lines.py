"""Checks `[serial]`: whether the ports are there, may be opened, and are wanted by other programs.

It works without a network and changes nothing. It opens no port, because that would reset an Arduino.
"""

import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.commands.check.finding import Finding, remark, wrong
from gateway.host.processes import has_open, running, this_user
from gateway.intake.routes import BAD_NAME, NO_ROUTE, Refusal, RouteTable
from gateway.record_contract import DEVICE_NAME, NAME_RULE
from gateway.serial_lines.kinds import CANNOT_ACKNOWLEDGE, devices, sections
from gateway.serial_lines.ports import (
    ALL,
    FRAMES,
    LOOK_ALIKES,
    USB_PORTS,
    awaited_words,
    how_to_be_let_in,
    is_path,
    leave_out,
    names_of,
    no_port_words,
    ports_of,
)
from gateway.serial_lines.rivals import (
    MODEM_MANAGER,
    Adapter,
    Holder,
    adapters,
    brltty_words,
    holders,
    is_console,
    is_spared_by_modem_manager,
    login_words,
    modem_manager_words,
    who_words,
)
from gateway.serial_lines.topic import topic_of
from gateway.settings import SerialSettings
from gateway.toml_files.mistakes import spell

PORTS_TOLD_MAX: Final = 12
_UNROUTED = {
    NO_ROUTE: "which no route takes",
    "ambiguous-route": "which several routes take, each to another place",
    BAD_NAME: f"in which its route finds no name (a name is {NAME_RULE})",
}
_DEVICE, _STREAM = "NAME", "STREAM"
"""Words in messages for the device and stream in the HELLO of a sensor with our frames."""
_LINKS = ("/dev/serial/by-id", "/dev/serial/by-path")
"""Folders of udev's names for USB adapters: by make and serial number, and by where they are plugged in."""
_DEVICES = Path("/sys/dev/char")
"""Folder of sysfs with devices by major and minor number."""


@dataclass(frozen=True, slots=True)
class _Box:
    """Adapters and open ports of this box, found once for all ports."""

    adapters: Collection[Adapter]
    held: Mapping[str, Collection[Holder]]
    """Programs that have a port open, by real path, without the running gateway of this buffer."""


def check_serial(settings: SerialSettings, buffer: Path, routes: RouteTable | None = None) -> Iterator[Finding]:
    """Check the ports and routes of all sections, and give each finding as soon as it is made.

    `buffer` is this gateway's buffer, by which its own process is known.
    """
    lines = sections(settings)
    patterns = [*settings.ports, *(line.settings.port for line in lines)]
    if not patterns:
        yield remark(
            "serial-without-ports", FRAMES, f"is empty, so no sensor is read; write the ports; {_ports_here()}"
        )
        return
    ports = {path for pattern in patterns for path in _real_ports(pattern)}
    lock = buffer.with_name(buffer.name + ".lock")
    held = {
        port: others
        for port, found in holders(ports).items()
        if (others := [holder for holder in found if not has_open(holder.process, lock)])
    }
    box = _Box(adapters(), held)
    named: dict[str, str] = {}
    for line in lines:
        yield from _one_port(spell((*line.place, "port")), line.settings.port, line.kind.header, named, box)
    if lines:
        yield Finding("serial", ok=True, words=CANNOT_ACKNOWLEDGE)
    yield from _many_ports(settings.ports, named, box)
    yield from _rivals(patterns, ports, box)
    yield from _look_alikes(patterns, box)
    for line in lines:
        for place, words in line.kind.remarks(line.settings, line.place):
            yield remark("serial-settings", spell(place), words)
        for place, words in line.kind.failures(line.settings, line.place):
            yield wrong("serial-format", spell(place), words)
    if routes is not None:
        yield from _unrouted(settings, routes)


# -- ports ----------------------------------------------------------------------------------------


def _one_port(subject: str, pattern: str, section: str, named: dict[str, str], box: _Box) -> Iterator[Finding]:
    """Check the one port that a section names, and add it to `named`."""
    ports = ports_of(pattern)
    if not ports:
        yield _missing(subject, pattern)
    elif len(ports) > 1:
        yield wrong(
            "serial-ambiguous",
            subject,
            f"{pattern} fits {len(ports)} ports now ({', '.join(sorted(ports.values()))}): write one of them; "
            f"{LOOK_ALIKES}",
        )
    for path, name in ports.items():
        other = named.setdefault(path, subject)
        if other != subject:
            yield wrong(
                "serial-port-twice",
                subject,
                f"{name} is also the port of {other}, and only one can read it; write another port",
            )
        elif len(ports) == 1:
            yield _port(subject, name, path, section, box)
            yield from _may_swap(subject, name, path, box)


def _may_swap(subject: str, name: str, path: str, box: _Box) -> Iterator[Finding]:
    """Warn of a name such as /dev/ttyUSB0 beside other adapters: after a restart it may be another adapter."""
    if name == path and len(box.adapters) > 1 and any(adapter.port == path for adapter in box.adapters):
        link = next((link for link in _links_to(path) if not _is_ambiguous(link, path, box)), None)
        instead = f"write {link}" if link else "write its name in /dev/serial/by-path"
        yield remark(
            "serial-may-swap",
            subject,
            f"{name} may be another adapter after a restart, and its readings then get the wrong device: {instead}",
        )


def _links_to(path: str) -> list[str]:
    return [
        link
        for folder in _LINKS
        for link in sorted(glob.glob(f"{folder}/*"))  # noqa: PTH207 - names as the settings have them
        if os.path.realpath(link) == path
    ]


def _is_ambiguous(link: str, path: str, box: _Box) -> bool:
    """Tell whether a link is from by-id, and another adapter looks the same."""
    return link.startswith(_LINKS[0]) and path in _ports_that_look_alike(box)


def _many_ports(patterns: Collection[str], named: Mapping[str, str], box: _Box) -> Iterator[Finding]:
    """Check the paths and globs of `serial.ports`, or `all`, except ports that another section names.

    Each port is checked once. Globs may overlap, but a path that is named twice is reported.
    """
    first: dict[str, str] = {}
    for pattern in patterns:
        names = names_of(pattern)
        if not names:
            yield _missing(FRAMES, pattern)
        for name in names:
            path = os.path.realpath(name)
            if path in named:
                if is_path(pattern):
                    yield remark(
                        "serial-port-twice",
                        named[path],
                        f"{name} is in {FRAMES} too, where it is ignored: take it out there, or, if its sensor speaks "
                        "our frames, remove this section",
                    )
            elif path not in first:
                first[path] = pattern
                yield _port(FRAMES, name, path, FRAMES, box)
            elif is_path(pattern) and is_path(first[path]):
                same = "is there twice" if name == first[path] else f"is {first[path]} by another name"
                yield remark(
                    "serial-port-twice", FRAMES, f"{name} {same}, and a port is opened once: remove one of the two"
                )


def _missing(subject: str, pattern: str) -> Finding:
    """Report a path that is not there as wrong, and a pattern without ports as a warning: ports may still come."""
    if is_path(pattern):
        return wrong(
            "serial-missing", subject, f"{pattern} is not there; plug it in, or write another port; {_ports_here()}"
        )
    return remark("serial-awaited", subject, awaited_words(pattern) + ("" if pattern == ALL else f"; {_ports_here()}"))


def _port(subject: str, name: str, path: str, section: str, box: _Box) -> Finding:
    try:
        found = os.stat(name)  # noqa: PTH116 - a name of glob's
    except OSError as error:
        what = f"cannot be examined ({error.strerror})"
        if isinstance(error, FileNotFoundError):
            what = "is a name whose adapter is not there (unplugged?)"
        return wrong("serial-missing", subject, f"{name} {what}: plug it in, or {leave_out(section)}")
    if not stat.S_ISCHR(found.st_mode) or _is_something_else(found.st_rdev):
        return wrong("serial-no-port", subject, f"{name}: {no_port_words(section)}")
    if is_console(path):
        return wrong(
            "serial-rivals", subject, f"{name} is this box's console, on which the kernel writes: {login_words(path)}"
        )
    if path in box.held:
        return wrong("serial-rivals", subject, f"{name}: {who_words(box.held[path], path, leave_out(section))}")
    if not os.access(name, os.R_OK | os.W_OK):
        return wrong(
            "serial-not-allowed", subject, f"{name} may not be opened by {this_user()}; {how_to_be_let_in(name)}"
        )
    return Finding(subject, ok=True, words=f"{name} may be opened by {this_user()}")


def _is_something_else(number: int) -> bool:
    """Tell, without opening it, whether a device is no terminal, such as `/dev/null`.

    sysfs does not have pseudo-terminals, nor adapters whose driver is not loaded. They may be terminals.
    """
    subsystem = _DEVICES / f"{os.major(number)}:{os.minor(number)}" / "subsystem"
    return subsystem.exists() and subsystem.resolve().name != "tty"


def _real_ports(pattern: str) -> set[str]:
    return {os.path.realpath(name) for name in names_of(pattern)}


def _ports_here() -> str:
    from serial.tools.list_ports import comports  # noqa: PLC0415 - only where there are serial lines

    found = sorted(port.device for port in comports())
    told = ", ".join(found[:PORTS_TOLD_MAX]) + (", ..." if len(found) > PORTS_TOLD_MAX else "")
    return f"here now: {told}" if found else "there is none here now"


# -- who else wants them --------------------------------------------------------------------------


def _rivals(patterns: Collection[str], ports: Collection[str], box: _Box) -> Iterator[Finding]:
    """Warn of programs that take USB adapters when they are plugged in."""
    if not any(map(_means_usb, patterns)):
        return
    manager = running(MODEM_MANAGER)
    mine = [each for each in box.adapters if each.port in ports]
    if manager is not None and not mine:
        yield remark("serial-rivals", "serial", f"ModemManager runs: {modem_manager_words('')}")
    elif manager is not None:
        one_of_each = {
            (each.vendor, each.product): each.port for each in mine if not is_spared_by_modem_manager(each.port)
        }
        for port in one_of_each.values():
            yield remark(
                "serial-rivals", "serial", f"ModemManager runs, and may take {port}: {modem_manager_words(port)}"
            )
    brltty = brltty_words()
    if brltty is not None:
        yield remark("serial-rivals", "serial", brltty)


def _means_usb(pattern: str) -> bool:
    beginnings = (*(usb.removesuffix("*") for usb in USB_PORTS), *_LINKS)
    return pattern == ALL or pattern.startswith(beginnings)


def _look_alikes(patterns: Collection[str], box: _Box) -> Iterator[Finding]:
    """Warn of adapters that by-id cannot tell apart, if the settings name ports by it."""
    alike = _ports_that_look_alike(box)
    if alike and any(pattern.startswith(_LINKS[0]) for pattern in patterns):
        yield remark(
            "serial-look-alikes",
            "serial",
            f"{', '.join(sorted(alike))} look alike, and {_LINKS[0]} shows only one of them, not always the same: "
            f"{LOOK_ALIKES}; sensors with our frames say their own names, so for them write "
            'ports = ["all"]',
        )


def _ports_that_look_alike(box: _Box) -> list[str]:
    """Ports of adapters of one make that have no serial number (CH340, PL2303), or all the same (some CP2102)."""
    # An adapter with several ports counts once: its ports have names of their own.
    makes = {(each.vendor, each.product, each.serial_number, each.socket) for each in box.adapters}
    counts = Counter(make[:-1] for make in makes)
    return [each.port for each in box.adapters if counts[each.vendor, each.product, each.serial_number] > 1]


# -- routes ---------------------------------------------------------------------------------------


def _unrouted(settings: SerialSettings, routes: RouteTable) -> Iterator[Finding]:
    """Report sensors whose readings would all be quarantined."""
    if settings.ports:
        yield from _unrouted_frames(settings.topic, routes)
    for place, device, stream in devices(settings):
        topic = topic_of(settings.topic, device, stream)
        found = routes.resolve(topic, None)
        if isinstance(found, Refusal):
            yield wrong(
                "serial-unrouted",
                spell(place),
                f"its readings get the topic {topic}, {_unrouted_words(found)}: they would all go to the quarantine; "
                "add a route for that topic, or write another stream",
            )


def _unrouted_words(found: Refusal) -> str:
    return _UNROUTED.get(found.reason, f"which its route cannot take ({found.reason})")


def _unrouted_frames(template: str, routes: RouteTable) -> Iterator[Finding]:
    """Report routes that take no sensor with our frames at all. Names and streams are known only from HELLO."""
    refused: dict[str, Refusal] = {}
    for topic in _topics_to_try(template, routes):
        found = routes.resolve(topic, None, is_serial=True)
        if not isinstance(found, Refusal):
            return
        refused[topic] = found
    # Prefer the refusal of a route that almost fits: it says more than that no route fits.
    topic = next((topic for topic, found in refused.items() if found.reason != NO_ROUTE), next(iter(refused)))
    yield wrong(
        "serial-unrouted",
        "serial.topic",
        f"readings of {FRAMES} get topics such as {topic}, {_unrouted_words(refused[topic])}: they would all go to the "
        "quarantine; add a route for such topics, or write another serial.topic",
    )


def _topics_to_try(template: str, routes: RouteTable) -> Iterator[str]:
    """Topics to try: one that only variables and wildcards take, and for each route one with the names in its text."""
    yield topic_of(template, _DEVICE, _STREAM)
    levels = [_level_names(level) for level in template.split("/")]
    for route in routes.routes:
        names = {"device": _DEVICE, "stream": _STREAM}
        # A route that ends in '#' may have fewer levels. A route of another length takes no such topic anyway.
        for level, wanted in zip(levels, route.settings.topic.split("/"), strict=False):
            found = level.fullmatch(wanted)
            names |= {} if found is None else found.groupdict()
        yield topic_of(template, names["device"], names["stream"])


def _level_names(level: str) -> re.Pattern[str]:
    """Pattern of a level of `serial.topic`, with groups for the device and the stream."""
    pattern = re.escape(level)
    for name in ("device", "stream"):
        pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{DEVICE_NAME.pattern})")
    return re.compile(pattern)
