"""Every mistake in gateway.toml gets its line, and what to write instead."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config_file import ConfigError, Mistake, load, parse
from gateway.settings import ListenerSettings

PATH = Path("gateway.toml")
GOOD = """\
[gateway]
id = "gw1"
clock = "system"

[buffer]
path = "/tmp/buffer.db"
bytes_max = 5_000_000

[mqtt_listener]
port = 1884
anonymous = true

[kafka]
bootstrap = ["kafka.example:9092"]

[[routes]]
topic = "device/{device}/{stream}"
kafka = "device-{stream}"

[[routes]]
topic = "meter/{device}"
kafka = "meters"
identity = "json"
"""


def mistakes(text: str) -> list[tuple[int, str]]:
    with pytest.raises(ConfigError) as raised:
        parse(text, PATH)
    return [(mistake.line, mistake.message) for mistake in raised.value.mistakes]


def test_a_good_file() -> None:
    settings = parse(GOOD, PATH)
    assert settings.gateway.id == "gw1"
    assert settings.buffer.path == Path("/tmp/buffer.db")  # noqa: S108
    assert settings.mqtt_listener == ListenerSettings(port=1884, anonymous=True)
    assert settings.serial is None
    assert [route.identity for route in settings.routes] == ["none", "json"]


@pytest.mark.parametrize(
    ("right", "wrong", "line", "words"),
    [
        ('id = "gw1"', 'id = "gw 1"', 2, '"gw 1" will not do; write 1 to 63 letters'),
        ("clock =", "clok =", 3, "gateway.clok: there is no such setting; write 'clock' instead"),
        ('"system"', '"sundial"', 3, 'write one of "kernel", "system"'),
        ("[buffer]", "[bufer]", 5, "write 'buffer' instead"),
        ("5_000_000", "5", 7, "write bytes, 1000000 (1 MB) to 1 TiB"),
        ("1884", "70000", 10, "70000 will not do; write a TCP port, 1 to 65535"),
        ("1884", '"1884"', 10, '"1884" will not do; write a TCP port'),
        ("anonymous = true", 'anonymous = "yes"', 11, "write true or false"),
        ("anonymous = true", "anonymous = false", 9, "nobody could connect"),
        ('["kafka.example:9092"]', '"kafka.example:9092"', 14, "write a list of texts"),
        (":9092", ":99999", 14, "99999 is no port; write 1 to 65535"),
        (":9092", "", 14, "write host:port"),
        ('topic = "meter/{device}"', 'topic = "meter"', 21, "must hold the variable {device} once"),
        ('kafka = "meters"', "kafka = 5", 22, "routes[1].kafka: 5 will not do; write a text"),
        ('kafka = "meters"', "", 20, "the setting routes[1].kafka is missing"),
        ('"kafka.example:9092"]', '"kafka.example:9092"', 14, "is not TOML"),
    ],
)
def test_a_mistake_has_its_line_and_what_to_write(right: str, wrong: str, line: int, words: str) -> None:
    assert right in GOOD
    found = mistakes(GOOD.replace(right, wrong, 1))
    assert [number for number, message in found if words in message] in ([line], [line + 2]), found


def test_all_mistakes_are_told_at_once() -> None:
    text = GOOD.replace("1884", "0").replace("clock =", "clok =")
    assert [line for line, _ in mistakes(text)] == [3, 10]


def test_missing_sections_come_with_an_example() -> None:
    assert mistakes("") == [
        (0, 'the section gateway is missing; write [gateway] with id = "the name of this box"'),
        (0, 'the section kafka is missing; write [kafka] with bootstrap = ["kafka.example:9092"]'),
    ]


def test_a_secret_in_the_clear_is_refused() -> None:
    text = GOOD.replace("anonymous = true", '[mqtt_listener.users]\n"42" = "letmein"')
    ((line, message),) = mistakes(text)
    assert line == 12
    assert "not the SHA-256 of a secret" in message
    assert "letmein" not in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "binary.toml")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60), st.integers(0, 20))
def test_whatever_stands_in_a_line_is_taken_or_answered(junk: str, line: int) -> None:
    lines = GOOD.splitlines()
    lines[line] = junk
    found: list[Mistake] = []
    try:
        parse("\n".join(lines), PATH)
    except ConfigError as error:
        found = error.mistakes
        message = str(error)
    assert all(0 <= mistake.line <= len(lines) for mistake in found)
    assert not found or message.startswith("gateway.toml:")
