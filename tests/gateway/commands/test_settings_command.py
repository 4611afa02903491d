"""`sluice settings`: every setting is there as it is declared, and can be found."""

import tomllib
from typing import get_args, get_type_hints

import msgspec
import pytest
from click.testing import CliRunner
from msgspec import Struct

from gateway.cli import main
from gateway.commands.settings_command import Setting, matching, sections
from gateway.settings import KafkaSettings, ListenerSettings, Settings, StatusPageSettings


def shown(*arguments: str) -> tuple[str, int]:
    ended = CliRunner().invoke(main, ["settings", *arguments])
    return ended.output, ended.exit_code


def named(header: str) -> dict[str, Setting]:
    (section,) = [section for section in sections() if section.header == header]
    return {setting.name: setting for setting in section.settings}


def structs_below(struct: type[Struct]) -> set[type[Struct]]:
    found = {struct}
    for hint in get_type_hints(struct).values():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, Struct):
                found |= structs_below(part)
    return found


def test_every_setting_of_every_section_is_there() -> None:
    declared = sum(
        not any(isinstance(part, type) and issubclass(part, Struct) for part in (hint, *get_args(hint)))
        for struct in structs_below(Settings)
        for hint in get_type_hints(struct).values()
    )
    # The sections of TLS and of SASL have a struct each; none is used twice.
    assert sum(len(section.settings) for section in sections()) == declared
    assert [section.header for section in sections()].count("[[serial.modbus.units.registers]]") == 1


@pytest.mark.parametrize(
    ("header", "made"),
    [
        ("[kafka]", KafkaSettings(bootstrap=())),
        ("[mqtt_listener]", ListenerSettings()),
        ("[status_page]", StatusPageSettings()),
    ],
)
def test_defaults_are_those_that_count(header: str, made: Struct) -> None:
    for name, setting in named(header).items():
        value = msgspec.json.decode(msgspec.json.encode(getattr(made, name), enc_hook=str))
        if setting.needed or value is None:
            assert setting.default is None
        else:
            assert setting.default is not None
            assert tomllib.loads(f"x = {setting.default}")["x"] == value


def test_what_it_is_for_and_what_it_takes_are_told() -> None:
    text, code = shown("bytes_per_day_max")
    assert code == 0
    assert "[kafka]  the brokers, and how readings go to them" in text
    assert "bytes_per_day_max = 0" in text
    assert "bytes, 0 to 1 PiB" in text
    assert "When they are used up, readings wait on disk until the next day" in text
    assert "bytes_per_s_max" not in text


def test_words_narrow_it_and_none_found_is_a_finding() -> None:
    assert {section.header for section in matching(tuple(sections()), ["tls"])} == {
        "[mqtt_listener.tls]",
        "[mqtt_brokers.tls]",
        "[kafka.tls]",
    }
    text, code = shown("no-such-word")
    assert code == 1
    assert "no setting has no-such-word" in text


def test_programs_get_them_as_json() -> None:
    text, _ = shown("--json", "gateway", "id")
    (found,) = json_of(text)
    assert (found["section"], found["name"], found["needed"]) == ("[gateway]", "id", True)


def json_of(text: str) -> list[dict[str, object]]:
    return msgspec.json.decode(text, type=list[dict[str, object]])
