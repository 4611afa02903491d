"""`[[mqtt_brokers]]`: wrong settings are reported with their line before anything starts, without passwords."""

from pathlib import Path

import pytest

from gateway.config.config_file import parse
from gateway.mqtt import topic_filters
from gateway.settings import BrokerSettings, BrokerTlsSettings
from gateway.toml_files.mistakes import ConfigError

PATH = Path("gateway.toml")
GOOD = """\
[gateway]
id = "gw1"

[kafka]
bootstrap = ["kafka.example:9092"]

[[mqtt_brokers]]
host = "mosquitto.example"
port = 8883
topics = ["device/#", "meter/+/power"]
user = "sluice"
password_file = "/etc/sluice/broker-password"

[mqtt_brokers.tls]
ca = "/etc/sluice/ca.pem"

[[mqtt_brokers]]
host = "other.example"
topics = ["device/#"]
"""


def test_a_good_file() -> None:
    assert parse(GOOD, PATH).mqtt_brokers == (
        BrokerSettings(
            host="mosquitto.example",
            port=8883,
            topics=("device/#", "meter/+/power"),
            user="sluice",
            password_file=Path("/etc/sluice/broker-password"),
            tls=BrokerTlsSettings(ca=Path("/etc/sluice/ca.pem")),
        ),
        BrokerSettings(host="other.example", topics=("device/#",)),
    )


@pytest.mark.parametrize(
    ("right", "wrong", "line", "words"),
    [
        ('host = "mosquitto.example"', 'host = ""', 8, "no host can be called so"),
        ('["device/#", "meter/+/power"]', "[]", 10, "nothing would be read"),
        (
            '"meter/+/power"',
            '"$share/site/meter/#"',
            10,
            "is a shared subscription: the broker would deal the messages",
        ),
        ('"meter/+/power"', '"meter/#/power"', 10, "has a '#' that is not the whole last level"),
        ('"meter/+/power"', '"meter/a+/power"', 10, "has a '+' that is not a whole level"),
        ('"meter/+/power"', '""', 10, "is empty"),
        ('"meter/+/power"', '"+/42/thermo"', 10, '"+/42/thermo" and "device/#" match some of the same topics'),
        ('user = "sluice"', 'password = "x"\nuser = "sluice"', 11, "stands beside password_file"),
        ('user = "sluice"\n', "", 7, "has a password and no user"),
        ('ca = "/etc/sluice/ca.pem"', 'key = "/etc/sluice/key.pem"', 14, "has one of certificate and key"),
        ('ca = "/etc/sluice/ca.pem"', "ca = 5", 15, "mqtt_brokers[0].tls.ca"),
        ("port = 8883", "port = 8883\nqos = 0", 10, "0 will not do; write one of 1, 2"),
        ("port = 8883", "port = 8883\nbackoff_s_min = 60", 10, "is above backoff_s_max"),
        ('host = "other.example"', 'host = "mosquitto.example"\nport = 8883', 17, "is the same session as"),
        ('host = "other.example"', 'host = "Mosquitto.example."\nport = 8883', 17, "is the same session as"),
        ("port = 8883", "port = 8883\npacket_bytes_max = 65538", 10, "write bytes, 65539 to"),
        ('user = "sluice"', f'user = "{"x" * 16_384}"', 11, "a text of at most 16383 characters"),
    ],
)
def test_a_mistake_has_its_line_and_what_to_write(right: str, wrong: str, line: int, words: str) -> None:
    assert right in GOOD
    with pytest.raises(ConfigError) as raised:
        parse(GOOD.replace(right, wrong, 1), PATH)
    (mistake,) = raised.value.mistakes
    assert words in mistake.message
    assert mistake.line == line


def test_this_box_by_its_other_names_is_the_same_session() -> None:
    here = GOOD.replace('host = "other.example"', 'host = "localhost"')
    for other in ("127.0.0.1", "LocalHost", "::1"):
        with pytest.raises(ConfigError, match="is the same session as"):
            parse(here + f'\n[[mqtt_brokers]]\nhost = "{other}"\ntopics = ["meter/#"]\n', PATH)


@pytest.mark.parametrize("value", ["12345", '["12345"]', "{ word = 12345 }"])
def test_a_password_is_never_shown(value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(GOOD.replace("password_file =", "password =").replace('"/etc/sluice/broker-password"', value), PATH)
    assert "12345" not in str(raised.value)
    assert "mqtt_brokers[0].password" in str(raised.value)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("device/#", "device/42/thermo", True),
        ("device/+/thermo", "device/42/+", True),
        ("device/+/thermo", "device/42", False),
        ("device/#", "device", True),
        ("#", "+/x", True),
        ("#", "$SYS/broker", False),
        ("$SYS/#", "$SYS/broker", True),
        ("a/b", "a/c", False),
        ("a/b/#", "a/+/c", True),
    ],
)
def test_which_filters_overlap(one: str, other: str, *, expected: bool) -> None:
    assert topic_filters.overlap(one, other) is expected
    assert topic_filters.overlap(other, one) is expected


def test_the_hint_for_a_shared_subscription_is_the_filter_within() -> None:
    assert "write 'meter/#'" in (topic_filters.mistake("$share/site/meter/#") or "")
    assert "write 'meter/#'" in (topic_filters.mistake("$queue/meter/#") or "")
