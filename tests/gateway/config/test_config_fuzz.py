"""Any text of `gateway.toml` is read, or each mistake gets its line and its words, and nothing else happens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from gateway.config import config_file
from gateway.settings import Settings
from gateway.toml_files.mistakes import ConfigError, Mistake
from tests.support.sizes import size

pytestmark = pytest.mark.slow

PATH = Path("gateway.toml")
WHOLE: dict[str, Any] = {
    "gateway": {"id": "barn-1", "namespace": "farm", "clock": "kernel"},
    "buffer": {"path": "/var/lib/sluice/buffer.db", "bytes_max": 1_000_000_000, "when_full": "refuse"},
    "mqtt_listener": {
        "host": "192.168.1.5",
        "port": 1883,
        "users": {"42": "9f" * 32},
        "operators": {"office": "8f" * 32},
        "command_topics": ["command/{device}/#"],
        "tls": {"certificate": "/etc/sluice/server.pem", "key": "/etc/sluice/server.key", "port": 8883},
    },
    "mqtt_brokers": [{"host": "broker.example", "topics": ["device/#"], "user": "u", "password": "p"}],
    "serial": {
        "ports": ["all"],
        "text": [{"port": "/dev/ttyUSB0", "device": "scale", "format": "csv", "columns": ["a", "b"]}],
        "modbus": [
            {"port": "/dev/ttyUSB1", "units": [{"unit": 1, "device": "m", "registers": [{"name": "t", "address": 0}]}]}
        ],
    },
    "kafka": {
        "bootstrap": ["kafka.example:9093"],
        "tls": {"ca": "/etc/sluice/ca.pem"},
        "sasl": {"mechanism": "SCRAM-SHA-512", "user": "barn-1", "password_file": "/etc/sluice/kafka.password"},
    },
    "routes": [{"topic": "device/{device}/{stream}", "kafka": "device-{stream}", "identity": "json"}],
    "status_page": {"port": 8080},
    "log": {"level": "info"},
}
scalars = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.booleans()
    | st.text(max_size=20)
    | st.sampled_from(["", "a/b", "#", "{device}", "[::1]:1", "é", "\x7f", "9" * 70, "kafka:9092", "../../x"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def names_of(struct: type[Struct]) -> Iterator[str]:
    """Every setting's name, whatever section it belongs to: the likeliest mistake is a right name in a wrong place."""
    for name, hint in get_type_hints(struct).items():
        yield name
        for part in (hint, *get_args(hint)):
            if get_origin(part) is None and isinstance(part, type) and issubclass(part, Struct):
                yield from names_of(part)


NAMES = sorted(set(names_of(Settings)))


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return text(value) if isinstance(value, str) else str(value)


def text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def places(value: object, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, *path, key)


def changed(document: dict[str, Any], place: tuple[str | int, ...], value: object, name: str | None) -> dict[str, Any]:
    """The document with another value in one place, or one under another name beside it."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    holder: Any = copy
    for key in place[:-1]:
        holder = holder[key]
    holder[name if name is not None and isinstance(holder, dict) else place[-1]] = value
    return copy


def test_the_whole_document_is_right_as_it_stands() -> None:
    config_file.parse("\n".join(f"{key} = {toml(value)}" for key, value in WHOLE.items()), PATH)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("times", [1, 2])
@settings(max_examples=size(150, 400), deadline=None)
@given(data=st.data())
def test_a_changed_document_is_read_or_told_of(times: int, data: st.DataObject) -> None:
    document = WHOLE
    for _ in range(times):
        place = data.draw(st.sampled_from(list(places(document))))
        name = data.draw(st.none() | st.sampled_from(NAMES) | st.text(max_size=8))
        document = changed(document, place, data.draw(values), name)
    lines = [f"{text(key)} = {toml(value)}" for key, value in document.items()]
    found: list[Mistake] | None = None
    try:
        config_file.parse("\n".join(lines), PATH)
    except ConfigError as error:
        found = error.mistakes
    assert found is None or found
    assert all(0 <= mistake.line <= len(lines) and mistake.message for mistake in found or ())
