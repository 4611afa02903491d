"""The kinds of serial lines, one record each, for the settings, `sluice check` and the ingress.

CONTRIBUTING.md lists all that a new kind needs. The ingress, the settings and `sluice check` find it by its record in
`KINDS`.

Sensors with our frames have no record: `[serial]` itself is their section. It may name many ports, and each of these
sensors says its own name. They alone can be told that a reading arrived.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from gateway.reading import SerialIntake
from gateway.serial_lines import format_mistakes, modbus_mistakes, text_mistakes
from gateway.settings import SerialFormatSettings, SerialModbusSettings, SerialSettings, SerialTextSettings
from gateway.toml_files.mistakes import Place

S = TypeVar("S")
"""A kind's settings class. It has `port` and `baud`."""


class Line(Protocol):
    """One open port and its sensors."""

    @property
    def name(self) -> str:
        """The port, by the name that the settings found."""

    @property
    def closed(self) -> bool:
        """Whether the port has been given back."""

    @property
    def devices(self) -> Collection[str]:
        """The devices on this line, as far as they are known."""

    @property
    def heard(self) -> Collection[str]:
        """The devices that were heard since the port was opened. Of polled devices, those that answer now."""

    def state(self) -> Mapping[str, object]:
        """The line's state, for `sluice status`."""

    def report_faults(self) -> None:
        """Log the faults since the last report."""

    def close(self, reason: str = "") -> None:
        """Give the port back."""


Open = Callable[[str, S, str, SerialIntake, Callable[[], int]], Awaitable[Line]]
"""Opens a port. Takes its name, its section's settings, `serial.topic`, the intake, and a function that gives
CLOCK_BOOTTIME in microseconds. Raises OSError, ValueError or termios.error."""
Judge = Callable[[S, Place], Iterable[tuple[Place, str]]]
"""Takes a section's settings and its place. Returns places of settings, each with the words about it."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[S]):
    """One kind of line. Each line has a section of its own."""

    name: str
    """Field of `SerialSettings`, and name in the file: `text` for `[[serial.text]]`."""
    words: str
    """Its name within a sentence."""
    devices: Callable[[S, Place], Iterable[tuple[Place, str, str]]]
    """All devices that a section names: the place, name and stream of each."""
    opener: Callable[[], Open[S]]
    """Loads the module that opens the port. Only a gateway with such lines calls it."""
    examples: Mapping[tuple[str, ...], str]
    """Advice for a missing setting, by its path in the section. `port` is not here, as all kinds share it."""
    mistakes: Judge[S] = lambda _settings, _place: ()
    """Settings that are wrong together."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Advice for a setting in the wrong section of this kind: where it belongs."""
    instead: Mapping[str, Callable[[object], str]] = field(default_factory=dict)
    """By setting, advice for a value that other programs have there; empty if it is unknown."""
    remarks: Judge[S] = lambda _settings, _place: ()
    """Settings that are likely not meant, for `sluice check`."""
    failures: Judge[S] = lambda _settings, _place: ()
    """What keeps a section from working on this box, for `sluice check`, beside its port."""
    same_port: str = "write another"
    """Advice if two sections of this kind name one port."""

    @property
    def header(self) -> str:
        """The header of its sections in the file."""
        return f"[[serial.{self.name}]]"


class Section(NamedTuple):
    """One section of the file: one line."""

    kind: Kind[Any]
    place: Place
    settings: Any
    """Of the kind's settings class."""


def sections(serial: SerialSettings) -> list[Section]:
    """All sections of all kinds."""
    return [
        Section(kind, ("serial", kind.name, index), settings)
        for kind in KINDS
        for index, settings in enumerate(getattr(serial, kind.name))
    ]


def devices(serial: SerialSettings) -> Iterator[tuple[Place, str, str]]:
    """The devices of all sections; see `Kind.devices`."""
    for section in sections(serial):
        yield from section.kind.devices(section.settings, section.place)


def _open_text() -> Open[SerialTextSettings]:
    from gateway.serial_lines.text_line import open_line  # noqa: PLC0415 - only if it is configured

    return open_line


def _open_format() -> Open[SerialFormatSettings]:
    from gateway.serial_lines.open_format import open_line  # noqa: PLC0415 - only if it is configured

    return open_line


def _open_modbus() -> Open[SerialModbusSettings]:
    from gateway.serial_lines.modbus_line import open_line  # noqa: PLC0415 - only if it is configured

    return open_line


TEXT: Final[Kind[SerialTextSettings]] = Kind(
    name="text",
    words="text",
    devices=lambda text, place: [(place, text.device, text.stream)],
    opener=_open_text,
    mistakes=text_mistakes.mistakes,
    examples=text_mistakes.EXAMPLES,
)
FORMAT: Final[Kind[SerialFormatSettings]] = Kind(
    name="format",
    words="formats",
    devices=lambda line, place: [(place, line.device, line.stream or line.format)],
    opener=_open_format,
    mistakes=format_mistakes.mistakes,
    examples=format_mistakes.EXAMPLES,
    remarks=format_mistakes.remarks,
    failures=format_mistakes.failures,
)
MODBUS: Final[Kind[SerialModbusSettings]] = Kind(
    name="modbus",
    words="Modbus",
    devices=lambda line, place: [
        ((*place, "units", number), unit.device, unit.stream) for number, unit in enumerate(line.units)
    ],
    opener=_open_modbus,
    mistakes=modbus_mistakes.mistakes,
    examples=modbus_mistakes.EXAMPLES,
    elsewhere=modbus_mistakes.ELSEWHERE,
    instead=modbus_mistakes.INSTEAD,
    remarks=modbus_mistakes.remarks,
    same_port="write all units of the line into one section",
)
KINDS: Final[tuple[Kind[Any], ...]] = (TEXT, FORMAT, MODBUS)
_WORDS: Final = [kind.words for kind in KINDS]
NAMES: Final = f"{', '.join(_WORDS[:-1])} and {_WORDS[-1]}"
"""All kinds in a sentence."""
CANNOT_ACKNOWLEDGE: Final = (
    f"readings of {NAMES} cannot be acknowledged: readings that come while nothing can be stored are lost, and counted"
)
"""Words on what these sensors cannot be told."""
