"""Every mistake in gateway.toml gets its line, and the correction."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.config.config_file import load, parse, route_table
from gateway.kafka.reach import host_and_port
from gateway.record_contract import NAME_RULE
from gateway.settings import KafkaSaslSettings, KafkaTlsSettings, ListenerSettings, Settings, TlsSettings
from gateway.toml_files.mistakes import ConfigError, Mistake

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
        ("1884", '"1884"', 10, '"1884" will not do; write a number, without quotes: a TCP port'),
        ("anonymous = true", 'anonymous = "yes"', 11, "write true or false"),
        ('["kafka.example:9092"]', '"kafka.example:9092"', 14, 'write it in brackets: ["kafka.example:9092"]'),
        ('["kafka.example:9092"]', "9092", 14, "write a list of texts"),
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


@pytest.mark.parametrize(
    ("settings", "setting", "words"),
    [
        ('time = "tick"', "time", "nothing says which boot's tick it is; write identity"),
        ('time = "senml"', "time", 'write content_type = "application/senml+json" or "application/senml+cbor"'),
        ('time = "senml"\nidentity = "json"\ncontent_type = "application/senml+json"', "time",
         'carry no boot and seq; leave identity out, or write identity = "properties" or time = "timestamp"'),
        ('identity = "cbor"', "identity", 'sent on as application/json: write content_type = "application/cbor"'),
        ('identity = "binary"', "identity", 'write content_type = "application/octet-stream"'),
        ('identity = "xml"', "identity", 'write one of "none", "json", "cbor", "binary", "properties"'),
        ('time = "mine"', "time", 'write one of "auto", "receipt", "tick", "senml", "timestamp", "property"'),
        ("time_error_ms = -1", "time_error_ms", "write milliseconds, 0 to 86400000"),
        ('identity = "json"\ntime_error_ms = 50', "time_error_ms",
         'none is read here, for time is "auto"; remove it, or write time = "senml", "timestamp" or "property"'),
        ('identity = "json"\ntime = "tick"\ntime_error_ms = 50', "time_error_ms", 'for time is "tick"; remove it'),
        ('time = "receipt"\ntime_error_ms = 50', "time_error_ms", 'for time is "receipt"; remove it'),
        ('oscillator = "crystal"', "oscillator",
         'no tick is read here, for identity is "none"; remove it, or write ide'),
        ('oscillator = "crystal"', "oscillator", "For sensors with our frames it is a setting of [serial]"),
        ("least_delay_ms = 400", "least_delay_ms", 'write identity = "json", "cbor", "binary" or "properties"'),
        ('identity = "json"\ntime = "receipt"\noscillator = "crystal"', "oscillator",
         'no tick is read here, for time is "receipt"; remove it, or write time = "auto"'),
        ('identity = "json"\ntime = "timestamp"\nleast_delay_ms = 0', "least_delay_ms", 'for time is "timestamp"'),
    ],
)  # fmt: skip
def test_what_a_payload_cannot_say_is_told(settings: str, setting: str, words: str) -> None:
    text = GOOD.replace('identity = "json"', settings)
    line = next(number for number, each in enumerate(text.split("\n"), start=1) if each.startswith(setting + " ="))
    ((found, message),) = mistakes(text)
    assert (found, message.partition(":")[0]) == (line, f"routes[1].{setting}")
    assert words in message


def test_what_a_payload_can_say() -> None:
    for settings in (
        'identity = "json"\ntime = "tick"',
        'identity = "json"\ntime = "timestamp"\ntime_error_ms = 50',
        'identity = "cbor"\ncontent_type = "application/cbor"',
        'identity = "binary"\ntime = "timestamp"\ncontent_type = "application/octet-stream"',
        'time = "senml"\ncontent_type = "application/senml+cbor"\ntime_error_ms = 0',
        'identity = "json"\noscillator = "crystal"\nleast_delay_ms = 400',
        'identity = "json"\ntime = "tick"\noscillator = "ceramic"',
        # They do nothing, and say nothing that is not so without them.
        'time = "receipt"\noscillator = "rc"\nleast_delay_ms = 50\ntime_error_ms = 1_000',
    ):
        assert route_table(parse(GOOD.replace('identity = "json"', settings), PATH)).routes


@pytest.mark.parametrize(
    ("section", "setting", "words"),
    [
        ("[gateway]", 'oscillator = "crystal"',
         "`oscillator` is a setting of [serial] and [[routes]]; settings here are: id"),
        ("[gateway]", "least_delay_ms = 400", "`least_delay_ms` is a setting of [[routes]]; settings here are: id"),
        ("[buffer]", "time_ahead_s_max = 5", "`time_ahead_s_max` is a setting of [gateway]; settings here are: path"),
        ("[buffer]", "scale = 5", "`scale` is a setting of [[serial.modbus.units.registers]]; settings here"),
        ("[[routes]]", 'fallback_topic = "strays"',
         "`fallback_topic` is a setting of the file's top, above the first section; "),
        ("[serial]", "time_error_ms = 50", "`time_error_ms` is a setting of [[routes]]; settings here are: ports"),
        ("[gateway]", "time_error_ms = 50",
         "write 'system_clock_error_ms' instead; `time_error_ms` is a setting of [[routes]]"),
        ("[[routes]]", 'topics = ["a"]', "write 'topic' instead; `topics` is a setting of [[mqtt_brokers]]"),
        ("[gateway]", 'mechanism = "PLAIN"', "`mechanism` is a setting of [kafka.sasl]; settings here are: id"),
        # Of a name that many have, that would be no hint.
        ("[gateway]", "port = 5", "there is no such setting; settings here are: id"),
    ],
)  # fmt: skip
def test_a_setting_in_the_wrong_section_is_told_where_it_belongs(section: str, setting: str, words: str) -> None:
    text = (GOOD + "[serial]\n").replace(section, f"{section}\n{setting}", 1)
    line = text.split("\n").index(setting) + 1
    ((found, message),) = mistakes(text)
    assert found == line
    assert words in message


NUL = "\\u0000"
"""The character NUL as a TOML file writes it."""


@pytest.mark.parametrize(
    ("right", "wrong", "line", "words"),
    [
        ("port = 1884", 'host = "a..b"', 10, 'host: "a..b": no host can be called so'),
        ("port = 1884", 'host = "0.0.0.0 "', 10, "write a host's name or its IP address"),
        ("port = 1884", 'host = "[::1]"', 10, '"[::1]": an address stands here without brackets; write "::1"'),
        ("kafka.example:", "a..b:", 14, '"a..b:9092": no host can be called so'),
        ("kafka.example:", f"{'x' * 64}.example:", 14, "have 1 to 63 characters"),
        ("kafka.example:", "kafka example:", 14, "write host:port"),
        ("buffer.db", f"{NUL}.db", 6, "buffer.path: holds the character U+0000"),
        ("buffer.db", r"C:\buffer.db", 6, "U+0008, which no path, address, name or topic can hold"),
        ("gw1", "gw1\\n", 2, "U+000A"),
        ("kafka.example:", f"kafka{NUL}:", 14, "U+0000"),
        ("meter/{device}", f"meter{NUL}/{{device}}", 21, "U+0000"),
        ("bytes_max = 5_000_000", f"bytes_max = 0x{'f' * 5_000}", 7, "a number of this size will not do; write bytes"),
    ],
)
def test_a_text_that_nobody_could_use_is_told_before_anything_starts(
    right: str, wrong: str, line: int, words: str
) -> None:
    ((number, message),) = mistakes(GOOD.replace(right, wrong, 1))
    assert (number, words in message) == (line, True), message
    assert message.isprintable(), "what stands in the file must not act on the terminal"


def with_top(line: str) -> str:
    return f"{line}\n{GOOD}"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (with_top('fallback_topic = "gateway-events"'), 1, "is kafka.events_topic, the gateway's own topic: a sensor"),
        (with_top('fallback_topic = "gateway-quarantine"'), 1, "is kafka.quarantine_topic, the gateway's own topic"),
        (with_top('fallback_topic = "all strays"'), 1, '"all strays" is no topic name'),
        (with_top('fallback_topic = ""'), 1, '"" is no topic name'),
        (with_top('fallback_topic = "__consumer_offsets"'), 1, "begins with __, as the topics do that Kafka keeps"),
        (GOOD.replace("[kafka]", '[kafka]\nevents_topic = "e/v"'), 14, 'kafka.events_topic: "e/v" is no topic name'),
        (GOOD.replace("[kafka]", '[kafka]\nquarantine_topic = ".."'), 14, "write 1 to 249 letters"),
        (GOOD.replace("[kafka]", '[kafka]\nquarantine_topic = "gateway-events"'), 14, "is kafka.events_topic too"),
        (GOOD.replace("[kafka]", '[kafka]\nevents_topic = "meters"'), 23,
         '"meters" is kafka.events_topic, the gateway'),
        (GOOD.replace('"meters"', '"gateway-quarantine"'), 22, "is kafka.quarantine_topic, the gateway's own topic"),
        (GOOD.replace('"meters"', '"__{device}"'), 22, "begins with __"),
        (GOOD.replace("meter/{device}", "device/{device}/{stream}"), 21, "takes the same topics as"),
        (GOOD.replace('"meters"', '"meters"\nkey = "{site}/{device}"'), 23,
         "uses {site}, which topic 'meter/{device}'"),
        (GOOD.replace('"meters"', '"meters"\ndevice = "m1"'), 23, "remove that, or the setting device"),
        (GOOD.replace("meter/{device}", "meter/x").replace('"meters"', '"meters"\nnames = "escape"\ndevice = "m"'), 23,
         "no name to escape"),
        (GOOD.replace('"meters"', '"meters"\nkey = "farm/{device}"').replace("anonymous = true", "anonymous = false"),
         23, "(not-the-writers-device)"),
        (GOOD.replace("meter/{device}", "device/{device}/{kind}"), 21, "of routes[0]: where the two routes differ"),
        (GOOD.replace("port = 1884", 'host = ""'), 10, 'write "0.0.0.0" if that is meant'),
    ],
)  # fmt: skip
def test_what_would_do_harm_is_refused(text: str, line: int, words: str) -> None:
    ((number, message),) = mistakes(text)
    assert (number, words in message) == (line, True), message


def test_a_route_that_names_its_device_may_take_the_topics_of_another_route() -> None:
    named = GOOD.replace("meter/{device}", "device/{hall}/{stream}").replace('"meters"', '"meters"\ndevice = "all"')
    assert parse(named, PATH).routes[1].device == "all"
    ((line, message),) = mistakes(named.replace('device = "all"', 'device = "all of it"'))
    assert (line, NAME_RULE in message) == (23, True)


def test_a_key_of_variables_is_taken_where_others_than_users_write() -> None:
    text = GOOD.replace('"meters"', '"meters"\nkey = "farm/{device}"').replace("anonymous = true", "")
    broker = '\n[[mqtt_brokers]]\nhost = "broker.example"\ntopics = ["meter/#"]\n'
    assert parse(text + broker, PATH).routes[1].key == "farm/{device}"


def test_routes_that_are_like_one_another_and_say_different_things_are_taken() -> None:
    text = GOOD.replace('"meter/{device}"', '"device/{device}/thermo"').replace('"meters"', '"gateway-thermo"')
    assert len(parse(with_top('fallback_topic = "strays"').replace(GOOD, text), PATH).routes) == 2


@pytest.mark.parametrize(
    "text", [f"x = {'[' * 5_000}{']' * 5_000}", f"x = {'{a=' * 5_000}1{'}' * 5_000}", f"x = {'[' * 5_000}"]
)
def test_a_file_nested_too_deep_is_told(text: str) -> None:
    ((_, message),) = mistakes(text)
    assert "too deep inside one another" in message


@pytest.mark.parametrize("text", [f"[{'.'.join('a' * 5_000)}]", f"kafka.bootstrap = [{{{'.'.join('a' * 5_000)} = 1}}]"])
def test_dotted_keys_nest_as_deep_as_they_like(text: str) -> None:
    assert any("there is no such setting" in message or "will not do" in message for _, message in mistakes(text))


def test_a_number_too_long_to_read_is_told() -> None:
    assert mistakes(f"x = {'9' * 5_000}") == [(0, "holds a number that is too long to be read; write a shorter one")]


def test_all_mistakes_are_told_at_once() -> None:
    text = GOOD.replace("1884", "-1").replace("clock =", "clok =")
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


DIGEST = "1c8bfe8f801d79745c4631d09fff36c82aa37fc4cce4fc946683d7b336b63032"
"""SHA-256 of "letmein"."""


@pytest.mark.parametrize("name", ["4 2", "", "+", "ward/42", "x" * 64])
def test_a_user_whose_readings_would_all_be_quarantined_is_refused(name: str) -> None:
    users = f'[mqtt_listener.users]\n"41" = "{DIGEST}"\n"4.2" = "{DIGEST}"\n'
    text = GOOD.replace("anonymous = true", users)
    assert parse(text, PATH).mqtt_listener == ListenerSettings(port=1884, users={"41": DIGEST, "4.2": DIGEST})
    ((line, message),) = mistakes(text.replace('"4.2"', f'"{name}"'))
    assert line == 13
    assert "is no device name, so that every reading of that user would go to the quarantine" in message


@pytest.mark.parametrize(
    "users",
    [
        '[mqtt_listener.users]\nletmein = "42"',
        '[mqtt_listener.users]\n"let letmein in" = "42"',
        '[mqtt_listener.users]\n"42" = ["letmein"]',
        '[mqtt_listener.users]\n"42".secret = "letmein"',
        '[mqtt_listener.users]\n"42" = "letmein\\u0000"',
        'users = "42:letmein"',
        'users = ["42", "letmein"]',
        '[[mqtt_listener.users]]\n"42" = "letmein"',
    ],
)
def test_a_secret_is_never_shown_wherever_it_was_written(users: str) -> None:
    found = mistakes(GOOD.replace("anonymous = true", users))
    assert found
    assert all(11 <= line <= 12 for line, _ in found)
    assert not any("letmein" in message for _, message in found)


TLS = '[mqtt_listener.tls]\ncertificate = "/etc/sluice/server.pem"\nkey = "/etc/sluice/server.key"\n'


def with_listener(lines: str, after: str = "") -> str:
    """The good file with more of the listener's: lines in its section, and sections behind it."""
    return GOOD.replace("anonymous = true\n", f"anonymous = true\n{lines}\n{after}")


def test_everything_that_the_listener_may_be_told() -> None:
    text = with_listener(
        'command_topics = ["command/{device}/#", "{device}/+/set"]\nsession_expiry_s = 86_400\nsessions_max = 100',
        f'{TLS}client_ca = "/etc/sluice/ca.pem"\nconnections_max = 50\n[mqtt_listener.operators]\nops = "{DIGEST}"\n',
    ).replace("port = 1884", "port = 0")
    listener = parse(text, PATH).mqtt_listener
    assert listener is not None
    assert listener.tls == TlsSettings(
        Path("/etc/sluice/server.pem"), Path("/etc/sluice/server.key"), 8883, Path("/etc/sluice/ca.pem"), 50
    )
    assert listener.operators == {"ops": DIGEST}
    assert listener.command_topics == ("command/{device}/#", "{device}/+/set")


@pytest.mark.parametrize("section", ["users", "operators"])
@pytest.mark.parametrize("setting", ["port = 21899", "anonymous = true", 'host = "0.0.0.0"', "connections_max = 5"])
def test_a_setting_of_the_listener_below_its_users_is_told_where_it_belongs(section: str, setting: str) -> None:
    text = GOOD.replace("anonymous = true", f"[mqtt_listener.{section}]\n{setting}")
    ((line, message),) = mistakes(text)
    name = setting.split(maxsplit=1)[0]
    assert (line, message) == (
        12,
        f"mqtt_listener.{section}: `{name}` is a setting of [mqtt_listener]: write it above [mqtt_listener.{section}]",
    )


def test_a_device_may_be_called_as_a_setting_is() -> None:
    text = GOOD.replace("anonymous = true", f'[mqtt_listener.users]\nhost = "{"0" * 64}"')
    listener = parse(text, Path("gateway.toml")).mqtt_listener
    assert listener is not None
    assert set(listener.users) == {"host"}


def test_devices_may_be_added_after_the_settings_are_written() -> None:
    listener = parse(GOOD.replace("anonymous = true", "anonymous = false"), PATH).mqtt_listener
    assert listener is not None
    assert not listener.users


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GOOD.replace("1884", "0"), 10,
         "port: is 0, so that nobody could connect; write a port, or add [mqtt_listener"),
        (with_listener("", TLS + "port = 1884\n"), 16, "tls.port: 1884 is mqtt_listener.port; write another"),
        (with_listener("", TLS.replace("key =", "kee =")), 15,
         "tls.kee: there is no such setting; write 'key' instead"),
        (with_listener("", "[mqtt_listener.tls]\n"), 13, "the setting mqtt_listener.tls.certificate is missing"),
        (with_listener("tls = true"), 12, "tls: true will not do; write a section in [brackets]"),
        (with_listener('command_topics = ["command/#"]'), 12, "must hold {device} once, as a level of its own"),
        (with_listener('command_topics = ["command-{device}/x"]'), 12, "must hold {device} once"),
        (with_listener('command_topics = ["a/{device}/b#"]'), 12, "level 'b#' will not do"),
        (with_listener('command_topics = ["#/{device}"]'), 12, "level '#' will not do"),
        (with_listener('command_topics = ["+/{device}"]'), 12, "must begin with plain text or {device}"),
        (with_listener('command_topics = ["$SYS/{device}"]'), 12, "must begin with plain text or {device}"),
        (with_listener('command_topics = "command/{device}"'), 12, "write it in brackets"),
        (with_listener("sessions_max = 0"), 12, "write sessions, 1 to 100000"),
        (with_listener("inflight_messages_max = 0"), 12, "write messages, 1 to 1000000"),
        (with_listener("", f'[mqtt_listener.users]\n"42" = "{DIGEST}"\n[mqtt_listener.operators]\n"42" = "{DIGEST}"\n'
         ), 16, "its secret would be a device's and an operator's"),
        (with_listener("", '[mqtt_listener.operators]\nops = "letmein"\n'), 14, "not the SHA-256 of a secret"),
        (with_listener("", '[mqtt_listener.operators]\nletmein = ["ops"]\n'), 14, "this value will not do"),
    ],
)  # fmt: skip
def test_mistakes_of_the_listener(text: str, line: int, words: str) -> None:
    found = mistakes(text)
    assert [number for number, message in found if words in message] in ([line], [line - 1]), found
    assert not any("letmein" in message for _, message in found)


@pytest.mark.parametrize("bootstrap", ['["me:letmein@kafka.example:9092"]', '"me:letmein@kafka.example:9092"'])
def test_a_password_in_an_address_is_not_shown(bootstrap: str) -> None:
    ((line, message),) = mistakes(GOOD.replace('["kafka.example:9092"]', bootstrap))
    assert line == 14
    assert "letmein" not in message


def with_kafka(more: str, plain: str = "") -> str:
    """GOOD with settings of [kafka], and sections below it. [kafka] is line 13."""
    return GOOD.replace('["kafka.example:9092"]\n', f'["kafka.example:9092"]\n{plain}{more}')


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("kafka.example:9092", "kafka.example:9092"),
        ("kafka.example:09092", "kafka.example:9092"),
        ("192.168.1.5:9092", "192.168.1.5:9092"),
        ("[::1]:9092", "[::1]:9092"),
        ("[2001:DB8:0:0:0:0:0:1]:09092", "[2001:db8::1]:9092"),
    ],
)
def test_an_address_is_read_in_one_spelling(written: str, read: str) -> None:
    text = with_kafka("").replace("kafka.example:9092", written)
    assert parse(text, PATH).kafka.bootstrap == (read,)
    host, _, port = read.rpartition(":")
    # As everybody else spells it who knows host and port.
    assert host_and_port(host.strip("[]"), int(port)) == read


def test_an_address_that_stands_there_twice_is_one() -> None:
    two = '["b.example:9092", "a.example:9092", "b.example:09092"]'
    text = with_kafka("").replace('["kafka.example:9092"]', two)
    assert parse(text, PATH).kafka.bootstrap == ("b.example:9092", "a.example:9092")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("kafka.example", "is no address; write host:port, such as 'kafka.example:9092'"),
        ("2001:db8::1:9092", "or '[2001:db8::1]:9092' with an address of IPv6"),
        ("[2001:db8::1]", "or '[2001:db8::1]:9092' with an address of IPv6"),
        ("http://kafka.example:9092", "leave out \"http://\": host:port alone, such as 'kafka.example:9092'"),
        ("SASL_SSL://kafka.example:9092", 'leave out "SASL_SSL://"'),
        (
            "a:9092, b:9092",
            'is several addresses in one text; write each in quotes of its own: ["a:9092", "b:9092"]',
        ),
        ("[:::]:9092", "no IPv6 address stands in the brackets; write '[2001:db8::1]:9092'"),
        ("[1]:9092", "no IPv6 address stands in the brackets"),
        ("192.168.1.010:9092", "192.168.1.010 is no IPv4 address; write four numbers, without zeros in front"),
        ("192.168.5:9092", "192.168.5 is no IPv4 address"),
        ("192.168.1.256:9092", "192.168.1.256 is no IPv4 address"),
        ("kafka.example:0", "0 is no port; write 1 to 65535"),
        ("kafka.example:65536", "65536 is no port"),
    ],
)
def test_an_address_that_is_none_is_told_with_what_to_write(written: str, words: str) -> None:
    ((line, message),) = mistakes(with_kafka("").replace("kafka.example:9092", written))
    assert (line, message.startswith("kafka.bootstrap: ")) == (14, True)
    assert message.endswith(words) or words in message


def test_no_more_addresses_than_anybody_would_try() -> None:
    many = ", ".join(f'"kafka-{number}.example:9092"' for number in range(33))
    ((line, message),) = mistakes(with_kafka("").replace('"kafka.example:9092"', many))
    assert line == 14
    assert message.startswith("kafka.bootstrap: has 33 addresses; write 32 at most: whichever of them answers names")


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ("heartbeat_interval_s = 1e-5", "kafka.heartbeat_interval_s: 1e-05 will not do; write seconds, 0.5 to 86400"),
        ("request_timeout_s = 1e-4", "write seconds, 1 to 600"),
        ("request_timeout_s = 86_400", "write seconds, 1 to 600"),
        ("connect_timeout_s = 0.01", "write seconds, 0.5 to 120"),
        ("connect_timeout_s = 86_400", "write seconds, 0.5 to 120"),
        ("backoff_s_max = 0.001", "write seconds, 0.25 to 3600"),
        ("backoff_s_max = 86_400", "write seconds, 0.25 to 3600"),
        ("live_age_s_max = 0.0001", "write seconds, 5 to 86400"),
        ("lane_s_min = 86_400", "write seconds, 0 to 3600"),
        ("record_bytes_max = 4_096", "write bytes, 65536 to 100000000"),
        ("batch_rows_max = 1", "write rows, 100 to 100000"),
        ("connect_timeout_s = 30", "kafka.connect_timeout_s: 30 is not below request_timeout_s (30)"),
        ("linger_ms = 7_501", "kafka.linger_ms: 7501 is more than a quarter of live_age_s_max (30 s)"),
        ("linger_ms = 7_501", "write 7500 at most, or raise live_age_s_max"),
        ("linger_ms = 60_000\nlive_age_s_max = 239", "60000 is more than a quarter of live_age_s_max (239 s)"),
    ],
)
def test_times_and_sizes_with_which_nothing_would_work(plain: str, words: str) -> None:
    ((line, message),) = mistakes(with_kafka("", f"{plain}\n"))
    assert line == 15
    assert words in message


def test_a_shorter_request_needs_a_shorter_connect() -> None:
    ((_, message),) = mistakes(with_kafka("", "request_timeout_s = 4\n"))
    assert "kafka.connect_timeout_s: 5 is not below request_timeout_s (4)" in message
    kafka = parse(with_kafka("", "request_timeout_s = 1\nconnect_timeout_s = 0.5\n"), PATH).kafka
    assert (kafka.request_timeout_s, kafka.connect_timeout_s) == (1, 0.5)


def test_what_the_slowest_of_links_needs_can_be_set() -> None:
    slow = "request_timeout_s = 600\nconnect_timeout_s = 120\nlinger_ms = 60_000\nlive_age_s_max = 240\n"
    assert parse(with_kafka("", slow), PATH).kafka.linger_ms == 60_000


SASL = '[kafka.sasl]\nmechanism = "{}"\nuser = "gw1"\npassword_file = "/etc/sluice/kafka-password"\n'


def test_how_kafka_is_logged_in_to() -> None:
    files = '[kafka.tls]\nca = "/etc/sluice/ca.pem"\ncertificate = "/etc/sluice/gw.pem"\nkey = "/etc/sluice/gw.key"\n'
    kafka = parse(with_kafka(files + SASL.format("PLAIN")), PATH).kafka
    assert kafka.tls == KafkaTlsSettings(
        ca=Path("/etc/sluice/ca.pem"), certificate=Path("/etc/sluice/gw.pem"), key=Path("/etc/sluice/gw.key")
    )
    assert kafka.sasl == KafkaSaslSettings(
        mechanism="PLAIN", user="gw1", password_file=Path("/etc/sluice/kafka-password")
    )
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
        assert parse(with_kafka(SASL.format(mechanism)), PATH).kafka.tls is None
    tokens = 'token_url = "https://[::1]:8443/token"\nscope = "a b"\nextensions = { logicalCluster = "lkc-1" }\n'
    sasl = parse(with_kafka(files + SASL.format("OAUTHBEARER") + tokens), PATH).kafka.sasl
    assert sasl is not None
    assert (sasl.token_url, sasl.scope, sasl.token_ca) == ("https://[::1]:8443/token", "a b", None)
    assert sasl.extensions == {"logicalCluster": "lkc-1"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (with_kafka(SASL.format("PLAIN")), 16, "without [kafka.tls] anybody on the way could read it; add [kafka.tls]"),
        (with_kafka(SASL.format("OAUTHBEARER") + 'token_url = "https://x"\n'), 16,
         "which sends an access token itself, and without [kafka.tls]"),
        (with_kafka("[kafka.tls]\n" + SASL.format("OAUTHBEARER")), 16,
         'no token_url; write token_url = "https://login.example/oauth2/token"'),
        *[(with_kafka("[kafka.tls]\n" + SASL.format("OAUTHBEARER") + f'token_url = "{url}"\n'), 20, "will not do")
          for url in ("http://login.example/token", "login.example", "https://", "https://u:p@x.example/", "https://[")],
        (with_kafka(SASL.format("SCRAM-SHA-256") + 'scope = "kafka"\n'), 19,
         'scope: is for mechanism = "OAUTHBEARER", and this is "SCRAM-SHA-256"; remove one'),
        (with_kafka(SASL.format("GSSAPI")), 16, 'write one of "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"'),
        (with_kafka(SASL.format("SCRAM-SHA-256").replace('"gw1"', '""')), 17,
         "kafka.sasl.user: is empty; write the name"),
        (with_kafka(SASL.format("SCRAM-SHA-256").replace("password_file", "password")), 18,
         "kafka.sasl.password: there is no such setting; write 'password_file' instead"),
        (with_kafka('[kafka.tls]\nkey = "k.pem"\n'), 15, "has one of certificate and key; write both, or neither"),
        (with_kafka('[kafka.tls]\ncertificate = "c.pem"\n'), 15, "has one of certificate and key"),
        (with_kafka("[kafka.tls]\nverify = false\n"), 16,
         "kafka.tls.verify: there is no such setting; certificates are always verified, for without that anybody"),
        (with_kafka("[kafka.tls]\nverify = false\n"), 16,
         "write its certificate into a file, and that file's path as ca"),
        (with_kafka("[kafka.tls]\ninsecure_skip_verify = true\n"), 16, "certificates are always verified"),
        (with_kafka(SASL.format("SCRAM-SHA-256").replace("password_file", "#")), 15,
         'kafka.sasl.password_file is missing; write password_file = "/etc/sluice/kafka.password", a file whose'),
        (with_kafka("", "bytes_per_s_max = 999\n"), 15, "write 1000 or more, or 0 for no bound"),
        (with_kafka("", "bytes_per_day_max = 1\n"), 15,
         "1 bytes do not carry even what connecting and heartbeats take"),
    ],
)  # fmt: skip
def test_mistakes_of_kafkas_access(text: str, line: int, words: str) -> None:
    found = mistakes(text)
    assert [number for number, message in found if words in message] == [line], found


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('security_protocol = "SASL_SSL"', "write [kafka.tls], with ca where the authority is one of your own. And a"),
        ('security_protocol = "SASL_SSL"', "write [kafka.sasl] with mechanism, user and password_file"),
        ('"security.protocol" = "SSL"', "write [kafka.tls], with ca"),
        ('security.protocol = "SSL"', "write [kafka.tls], with ca"),
        ('ssl_cafile = "ca.pem"', "write [kafka.tls], with ca"),
        ('sasl_mechanism = "PLAIN"', "write [kafka.sasl] with mechanism, user and password_file"),
        ('sasl_plain_password = "letmein"', "write [kafka.sasl] with mechanism, user and password_file"),
        ('username = "gw1"', "write [kafka.sasl] with mechanism, user and password_file"),
    ],
)
def test_settings_named_as_in_other_kafka_clients_lead_to_ours(setting: str, words: str) -> None:
    ((line, message),) = mistakes(with_kafka("", f"{setting}\n"))
    assert line == 15
    assert "there is no such setting; " in message
    assert words in message
    assert "letmein" not in message


def test_sections_of_kafkas_at_the_top_are_told_where_they_belong() -> None:
    sasl, tls = (message for _, message in mistakes(with_kafka('[sasl]\nuser = "gw1"\n[tls]\nca = "ca.pem"\n')))
    assert sasl == "sasl: there is no such setting; write [kafka.sasl] instead"
    assert tls.startswith(
        "tls: there is no such setting; write [kafka.tls] for the way to Kafka, or [mqtt_listener.tls]"
    )


def test_a_list_in_one_text_is_told_as_the_list_that_it_is() -> None:
    ((_, message),) = mistakes(with_kafka("").replace('["kafka.example:9092"]', '"a:9092,b:9092"'))
    assert message.endswith('write it in brackets: ["a:9092", "b:9092"]')


@pytest.mark.parametrize(
    "wrong", ['sasl = "me:letmein"', 'sasl = ["letmein"]', '[kafka.sasl]\npassword_file = ["letmein"]']
)
def test_a_password_in_the_wrong_place_of_kafkas_is_not_shown(wrong: str) -> None:
    assert "letmein" not in str(mistakes(with_kafka(f"{wrong}\n")))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("backlog", '"backlog" must hold {topic} once, as in "{topic}.backlog"'),
        ("", '"" must hold {topic} once'),
        ("{topic}.{topic}", "must hold {topic} once"),
        ("{topic}", "is the topic of live readings itself; leave it out"),
        ("{topic}/backlog", "makes no topic name: beside {topic} write letters, digits"),
        ("{topic}.{device}", "makes no topic name"),
        ("__{topic}", "begins with __, as the topics do that Kafka keeps for itself"),
        ("gateway-{topic}", 'could make "gateway-events", which is kafka.events_topic, the gateway\'s own topic'),
        ("{topic}-quarantine", 'could make "gateway-quarantine", which is kafka.quarantine_topic'),
        ("{topic}" + "x" * 244, 'makes a name of 250 characters from "meters", and Kafka takes 249; shorten one'),
    ],
)
def test_a_backlog_topic_that_cannot_work(template: str, words: str) -> None:
    found = mistakes(with_kafka("", f'backlog_topic = "{template}"\n'))
    assert any(words in message for _, message in found), found
    assert {line for line, _ in found} == {15}


@pytest.mark.parametrize("template", ["{topic}.backlog", "backlog-{topic}", "{topic}" + "x" * 243])
def test_a_backlog_topic_that_works(template: str) -> None:
    assert parse(with_kafka("", f'backlog_topic = "{template}"\n'), PATH).kafka.backlog_topic == template


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ('devices = ["*"]\ntopic = "commands"', "must hold {gateway} once"),
        ('devices = ["*"]\ntopic = "a b.{gateway}"', "is no topic name"),
        ('devices = ["*"]\ntopic = "__{gateway}"', "begins with __"),
        ("devices = []", "is empty, so that no device could be commanded"),
        ('devices = ["heater*", "a/b"]', '"a/b" fits no device name'),
    ],
)
def test_commands_that_cannot_work(section: str, words: str) -> None:
    ((_, message),) = mistakes(f"{GOOD}\n[commands]\n{section}\n")
    assert words in message


def test_commands_need_a_command_topic_with_room_below_it() -> None:
    text = GOOD.replace("anonymous = true", 'anonymous = true\ncommand_topics = ["to/+/{device}"]')
    assert parse(text, PATH).mqtt_listener is not None
    ((_, message),) = mistakes(f'{text}\n[commands]\ndevices = ["*"]\n')
    assert "add 'command/{device}/#'" in message


def test_no_route_leads_to_the_topic_of_commands() -> None:
    text = f'{GOOD}\n[commands]\ndevices = ["*"]\n[[routes]]\ntopic = "x/{{device}}"\nkafka = "gateway-commands.gw1"\n'
    ((_, message),) = mistakes(text)
    assert "is commands.topic, the gateway's own topic" in message
    settings = parse(f'{GOOD}\n[commands]\ndevices = ["*"]\n', PATH)
    assert settings.commands is not None
    assert settings.commands.topic_of("gw1") in route_table(settings).reserved_topics


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('structured_topic = "events"', '"events" must hold {topic} once, as in "structured-{topic}"'),
        ('latest_topic = "{topic}"', "is the topic of live readings itself"),
        ('latest_topic = "structured-{topic}"', "is kafka.structured_topic too, and is compacted"),
        (
            'latest_topic = "{topic}.x"\nbacklog_topic = "{topic}.x"',
            "is kafka.backlog_topic too, and is compacted",
        ),
    ],
)
def test_further_topics_that_cannot_work(lines: str, words: str) -> None:
    found = mistakes(with_kafka("", f"{lines}\n"))
    assert any(words in message for _, message in found), found


def test_a_topic_of_readings_is_none_of_last_readings() -> None:
    text = with_kafka("", 'latest_topic = "latest-{topic}"\n')
    assert parse(text, PATH).kafka.latest_topic == "latest-{topic}"
    routed = text + '[[routes]]\ntopic = "a/{device}"\nkafka = "latest-a"\n'
    ((_, message),) = mistakes(routed)
    assert '"latest-a" is such a topic, and has a route\'s readings' in message


def test_an_unknown_setting_cannot_act_on_the_terminal() -> None:
    assert mistakes(with_top('"\\u001b[2J" = 1')) == [
        (0, '"\\u001b[2J": there is no such setting; settings here are: ' + ", ".join(Settings.__struct_fields__))
    ]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "notepad.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(tmp_path / "notepad.toml") == parse(GOOD, PATH)


def test_the_buffers_path_is_that_of_the_real_file_in_all_parts(tmp_path: Path) -> None:
    real, link = tmp_path / "card" / "buffer.db", tmp_path / "buffer.db"
    link.symlink_to(real)
    config = tmp_path / "gateway.toml"
    config.write_text(GOOD.replace("/tmp/buffer.db", str(link)))  # noqa: S108
    # Before the file is there as well: it is made where the link leads.
    assert load(config).buffer.path == real
    real.parent.mkdir()
    real.touch()
    assert load(config).buffer.path == real
    loop = tmp_path / "loop.db"
    loop.symlink_to(loop)
    config.write_text(GOOD.replace("/tmp/buffer.db", str(loop)))  # noqa: S108
    assert load(config).buffer.path == loop


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file; write one"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a directory; name the file in it with --config"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text, as TOML must be; save it as UTF-8"):
        load(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[gateway]\nid = barn", 2, "at column 6: no value stands behind the =; write a text in double quotes"),
        ("create_topics = yes", 1, "at column 17: write true, in small letters and without quotes"),
        ("a = [False, true]", 1, "write false, in small letters"),
        ("id = Yesterday", 1, "no value stands behind the =; write a text in double quotes"),
        ("id = \u201cbarn-1\u201d", 1, "these quotes are a word processor's; write straight ones"),
        ('[gateway]\nid = "barn\n', 2, "a text ends in no double quote"),
        ('[gateway]\nid = "a"\nid = "b"', 3, "this name was given a value before; remove one of the two"),
        ("[gateway]\n[gateway]", 2, "this section stands in the file already; write its settings together, or"),
        ("[gateway\n", 1, "a section's name stands in brackets"),
        ("gateway\n", 1, "a setting is written name = value"),
        ("= 3", 1, "write [section] or name = value"),
        ("a = 1 2", 1, "something follows the value"),
        ('path = "C:\\x"', 1, "write the text in single quotes"),
        # An address, or a unit, that began like a number.
        (
            "[mqtt_listener]\nhost = 127.0.0.1",
            2,
            'this is no number; put texts in double quotes, as in host = "127.0.0.1"',
        ),
        ("host = 127.0.0.1 # here", 1, "put texts in double quotes"),
        ("bootstrap = [10.0.0.1:9092]", 1, "put texts in double quotes"),
        ("linger_ms = 50ms", 1, "this is no number"),
        ("a = 1, 2", 1, "something follows the value"),
        # Files that end early.
        ("[gateway]\nid", 2, "a setting is written name = value"),
        ("[gateway]\nid =", 2, "no value stands behind the =; write a text in double quotes"),
        ("[gateway", 1, "a section's name stands in brackets, as in [kafka]; close them"),
        ("[[routes]\n", 1, "a name that begins with [[ ends with ]], as in [[routes]]; close them"),
        ("[[routes", 1, "a name that begins with [[ ends with ]], as in [[routes]]; close them"),
        ("[", 1, "the file ends where a name should stand; write it, and close the brackets that are open"),
        ("a = {b = 1,", 1, "the file ends where a name should stand; write it, and close the brackets"),
        ("a = [1,\n\n", 1, "a list or a brace is not closed; write ] or } at its end"),
        ("a = [", 1, "a list or a brace is not closed"),
        ("a = {b = 1", 1, "a list or a brace is not closed"),
        ('a = "b', 1, "a text ends in no double quote"),
        ("x = 'a\ny = 1\n", 1, "a text that begins with a single quote ends in none"),
        ("x = 'a\ny = 'b'\n", 1, "a text ends in no single quote"),
        ("a = '''b\nc", 1, "a text that begins with a single quote ends in none"),
        ('a = "\x01"', 1, "a character that cannot be seen stands here; remove it"),
        ('a = "\\u12"', 1, "a backslash means something else in double quotes"),
        # Braces that go on behind the line's end.
        ('r = [{name = "a}",  # a note\n address = 1}]', 1, "at column 21: all within { } must stand on one line"),
        ("r = {\n name = 1}", 1, "all within { } must stand on one line"),
        ("r = {name = 1\n}", 1, "all within { } must stand on one line"),
        ("r = {name =\n 1}", 1, "all within { } must stand on one line"),
        ('r = {name = "a\n}', 1, "a text ends in no double quote"),
        ("r = [{name = 1}\n", 1, "a list or a brace is not closed"),
    ],
)
def test_what_is_no_toml_is_told_with_what_to_write(text: str, line: int, words: str) -> None:
    ((found, message),) = mistakes(text)
    assert found == line
    assert message.startswith("is not TOML")
    assert words in message


NBSP = "\u00a0"


@pytest.mark.parametrize(
    ("right", "wrong", "line", "column", "name"),
    [
        ("kafka.example:9092", f"kafka.example:9092{NBSP}", 14, 33, "no-break space (U+00A0)"),
        ("device/{device}/{stream}", "device/{device}/\u200b{stream}", 17, 26, "zero width space (U+200B)"),
        ('id = "gw1"', f'id{NBSP}= "gw1"', 2, 3, "no-break space"),
        ('id = "gw1"', f'id ={NBSP}"gw1"', 2, 5, "no-break space"),
        ('id = "gw1"', f'{NBSP}id = "gw1"', 2, 1, "no-break space"),
        ("port = 1884", f"port = 1884{NBSP}# a note", 10, 12, "no-break space"),
        ('"meter/{device}"', "'meter/{device}#\u3000'", 21, 25, "ideographic space (U+3000)"),
        ('"meters"', '"meters\u2060"', 22, 16, "word joiner (U+2060)"),
        ("[kafka]", f"[kafka]{NBSP}", 13, 8, "no-break space"),
        ('"meters"', '"meters\x85"', 22, 16, "a control character (U+0085)"),
    ],
)
def test_what_nobody_sees_is_named_with_its_place(right: str, wrong: str, line: int, column: int, name: str) -> None:
    ((found, message),) = mistakes(GOOD.replace(right, wrong, 1))
    assert found == line
    assert message.startswith(f"column {column}: here stands {name}")


def test_what_nobody_sees_may_stand_in_a_note_and_as_an_escape() -> None:
    text = GOOD.replace("[kafka]", f"[kafka]  # a{NBSP}note, \u200b\n# and{NBSP}one more")
    text = text.replace("buffer.db", "no\\u00a0#1.db")
    assert parse(text, PATH).buffer.path.name == f"no{NBSP}#1.db"


@given(st.lists(st.sampled_from([*"[]{}='\"\\\n\t ,.#-a1\x01", "'''", '"""', "\\u", "a=", "2020-01-99"]), max_size=12))
def test_nobody_is_answered_in_the_words_of_a_parser(parts: list[str]) -> None:
    text = "".join(parts)
    told = ""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = str(error).partition(" (at ")[0]
    assume(told)
    ((line, message),) = mistakes(text)
    assert told not in message
    assert 1 <= line <= text.count("\n") + 1


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


@given(st.text(alphabet=st.sampled_from("ab.-:é[]\u3002\u0000 "), max_size=12) | st.text(st.just("x"), max_size=70))
def test_a_host_that_is_taken_can_be_looked_up(host: str) -> None:
    written = msgspec.json.encode(host).decode()
    try:
        settings = parse(GOOD.replace("port = 1884", f"host = {written}"), PATH)
    except ConfigError:
        return
    assert settings.mqtt_listener is not None
    assert settings.mqtt_listener.host == host != ""
    assert b"\0" not in host.encode("idna")


def test_a_message_that_could_never_be_stored_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(
        """
[gateway]
id = "gw1"
[kafka]
bootstrap = ["kafka:9092"]
[buffer]
bytes_max = 1_000_000
[[mqtt_brokers]]
host = "broker.example"
topics = ["device/#"]
"""
    )
    with pytest.raises(ConfigError) as found:
        load(path)
    (mistake,) = found.value.mistakes
    assert "more than half of buffer.bytes_max" in mistake.message


# -- serial lines ---------------------------------------------------------------------------------

SERIAL = """\
[gateway]
id = "gw1"
[kafka]
bootstrap = ["kafka.example:9092"]
[serial]
ports = ["all", "/dev/ttyS1"]
[[serial.text]]
port = "/dev/ttyUSB1"
device = "scale"
format = "csv"
columns = ["grams", "", "state"]
[[serial.text]]
port = "/dev/ttyUSB2"
device = "wind"
format = "nmea"
[serial.text.sentences]
MWV = ["angle", "", "speed"]
[[serial.modbus]]
port = "/dev/ttyUSB3"
parity = "none"
[[serial.modbus.units]]
unit = 1
device = "meter"
[[serial.modbus.units.registers]]
name = "volts"
address = 0
table = "input"
type = "f32"
[[serial.modbus.units.registers]]
name = "open"
address = 3
table = "coil"
type = "bit"
[[serial.modbus.units]]
unit = 2
device = "cellar"
registers = [{name = "celsius", address = 1, type = "s16", scale = 0.1}]
"""


def test_sections_of_serial_lines() -> None:
    serial = parse(SERIAL, PATH).serial
    assert serial is not None
    assert serial.text[1].sentences == {"MWV": ("angle", "", "speed")}
    assert (serial.text[0].units, serial.text[0].texts) == ((), ())
    assert [(unit.unit, unit.device, len(unit.registers)) for unit in serial.modbus[0].units] == [
        (1, "meter", 2),
        (2, "cellar", 1),
    ]


@pytest.mark.parametrize(
    ("names", "orders"),
    [
        ("abcd,AB CD,ab-cd,Abcdefgh,big,big-endian,Big Endian,BE,high_first,MSW first,1234", ["ABCD"]),
        ("cdab,CD AB,word swap,word-swapped,word_swap,swapped words,swap_words,mid-little,Mid-Little Endian", ["CDAB"]),
        ("low first,LSW,little-endian byte swap,3412,GHEFCDAB", ["CDAB"]),
        ("badc,BA DC,BA,byte swap,byte-swapped,swap_bytes,mid-big,big-endian byte swap,BADCFEHG", ["BADC"]),
        ("dcba,DC BA,4321,word_byte,HGFEDCBA", ["DCBA"]),
        ("little,little-endian,LE,Little Endian", ["DCBA", "CDAB"]),
        ("swapped,swap,reversed", ["CDAB", "BADC", "DCBA"]),
        ("middle-endian,mixed", ["CDAB", "BADC"]),
        ("ACBD,PDP,", ["ABCD", "CDAB", "BADC", "DCBA"]),
    ],
)
def test_other_names_of_an_order_of_bytes_are_told_by_ours(names: str, orders: list[str]) -> None:
    for name in names.split(","):
        ((line, message),) = mistakes(SERIAL.replace('type = "f32"', f'type = "f32"\nword_order = "{name}"'))
        assert line == 29
        assert "will not do; write " in message
        assert re.findall(r'"([A-D]{4})" \(', message) == orders, message


@pytest.mark.parametrize("order", ["ABCD", "CDAB", "BADC", "DCBA", "high-first", "low-first"])
def test_orders_of_bytes(order: str) -> None:
    serial = parse(SERIAL.replace('type = "f32"', f'type = "f32"\nword_order = "{order}"'), PATH).serial
    assert serial is not None
    assert serial.modbus[0].units[0].registers[0].word_order == order


@pytest.mark.parametrize(
    ("kind", "null_if"),
    [
        ("u16", "[65535]"),
        ("s16", "[0x8000, -32768, 0xFFFF]"),
        ("u32", "[0xFFFFFFFF, 0x80000000]"),
        ("s32", "[0x80000000, -2147483648]"),
        ("u64", "[0xFFFFFFFFFFFFFFFF]"),
        ("s64", "[0x8000000000000000, -9223372036854775808]"),
        ("f32", "[]"),
    ],
)
def test_numbers_that_stand_for_no_value_may_be_written_signed_or_by_their_bits(kind: str, null_if: str) -> None:
    serial = parse(SERIAL.replace('type = "f32"', f'type = "{kind}"\nnull_if = {null_if}'), PATH).serial
    assert serial is not None
    assert list(serial.modbus[0].units[0].registers[0].null_if) == tomllib.loads(f"a = {null_if}")["a"]


def test_routes_know_whose_the_topics_of_serial_lines_are() -> None:
    text = SERIAL.replace("[serial]\n", '[serial]\ntopic = "farm.1/{stream}/{device}"\n')
    routes = route_table(parse(text, PATH))
    assert routes.serial_device("farm.1/thermo/attic-2") == "attic-2"
    assert routes.serial_device("farmX1/thermo/attic-2") == ""
    assert route_table(parse(SERIAL.partition("[serial]")[0], PATH)).serial_device("device/a/thermo") == ""


@pytest.mark.parametrize(
    ("right", "wrong", "line", "words"),
    [
        ('"all", ', '"ttyUSB0", ', 6, '"ttyUSB0" is no path; write the whole path'),
        ('"all", ', '"ALL", ', 6, 'or "all" for every USB adapter'),
        ('port = "/dev/ttyUSB1"', 'port = "all"', 8, "names every adapter, and this is one line"),
        ('port = "/dev/ttyUSB1"', 'port = "COM3"', 8, '"COM3" is no path'),
        ('port = "/dev/ttyUSB1"\n', "", 7, 'serial.text[0].port is missing; write port = "/dev/ttyUSB0"'),
        ("/dev/ttyUSB2", "/dev/ttyUSB1", 13, '"/dev/ttyUSB1" is serial.text[0].port too, and a port has one reader'),
        ("/dev/ttyUSB3", "/dev/ttyUSB2", 19, '"/dev/ttyUSB2" is serial.text[1].port too'),
        ('"wind"', '"scale"', 14, '"scale" is serial.text[0].device too'),
        ('"cellar"', '"scale"', 36, "serial.modbus[0].units[1].device"),
        ('"wind"', '"wi nd"', 14, '"wi nd" will not do'),
        ('columns = ["grams", "", "state"]', "", 7, 'has format = "csv" and no columns'),
        ('["grams", "", "state"]', '["", ""]', 11, "names none of the values"),
        ('["grams", "", "state"]', '["grams", "grams"]', 11, '"grams" stands here twice'),
        ('format = "csv"', 'format = "json"', 11, 'is for format = "csv", and this is "json"'),
        ('format = "nmea"', 'format = "json"', 16, 'is for format = "nmea", and this is "json"'),
        ('format = "nmea"', 'format = "nmea"\ndelimiter = ";"', 16, "delimiter: is for format = "),
        ('format = "csv"', 'format = "csv"\nunits = ["g", "g"]', 11, 'units: "g" stands here twice'),
        ('format = "csv"', 'format = "csv"\nunits = ["k g"]', 11,
         '"k g" is no unit; write it as it stands behind the number'),
        ('format = "csv"', 'format = "csv"\nunits = ["5"]', 11, '"5" is no unit'),
        ('format = "csv"', 'format = "csv"\nunits = [""]', 11, '"" is no unit'),
        ('format = "csv"', 'format = "csv"\nunits = "g"', 11, "units"),
        ('format = "csv"', 'format = "csv"\ntexts = ["id"]', 11, 'no field of the lines is named "id"'),
        ('format = "csv"', 'format = "csv"\non_change = { id = 1 }', 11, "on_change: no field of the lines is named"),
        ('format = "csv"', 'format = "csv"\non_change = { grams = -1 }', 11, "-1 will not do; write a number, 0 to"),
        ('format = "csv"', 'format = "csv"\nsilence_s_max = 60', 11, "is of members that on_change names"),
        ('type = "f32"', 'type = "f32"\non_change = "1"', 29, "write a number, 0 to 1e12"),
        ('device = "meter"', 'device = "meter"\nsilence_s_max = 60', 24, "is of registers with on_change"),
        ('format = "csv"', 'format = "csv"\ntexts = [""]', 11, 'no field of the lines is named ""'),
        ('format = "csv"', 'format = "csv"\ntexts = ["state", "state"]', 11, 'texts: "state" stands here twice'),
        ('format = "nmea"', 'format = "nmea"\ntexts = ["1"]', 16, 'no field of the lines is named "1"'),
        ('format = "csv"\ncolumns = ["grams", "", "state"]', 'format = "json"\ntexts = ["id"]', 11,
         "texts: is for lines whose"),
        ('format = "csv"\ncolumns = ["grams", "", "state"]', 'format = "json"\nunits = ["g"]', 11,
         "units: is for lines whose"),
        ("MWV =", "mwv =", 17, '"mwv" is no type of a sentence'),
        ('["angle", "", "speed"]', '["", ""]', 17, "write [] to number them all"),
        ('["angle", "", "speed"]', '["sentence"]', 17, "says which sentence it was; write another name"),
        ('["angle", "", "speed"]', '["angle", "angle"]', 17, '"angle" stands here twice'),
        ("unit = 2", "unit = 1", 35, "1 is serial.modbus[0].units[0].unit too, and both would answer at once"),
        ("unit = 2", "unit = 0", 35, "0 will not do; write a unit's address, 1 to 247"),
        ('parity = "none"', 'baud = "9600"', 20, '"9600" will not do; write a number, without quotes: one of 300, 600'),
        ('format = "csv"', 'format = "csv"\nstop_bits = "2"', 11, "write a number, without quotes: one of 1, 2"),
        ('parity = "none"', 'parity = "None"', 20, '"None" will not do; write one of "none", "even", "odd"'),
        ('parity = "none"', "registers = []", 20, "no such setting; it belongs under [[serial.modbus.units]]"),
        ('parity = "none"', 'device = "meter"', 20, "no such setting; it belongs under [[serial.modbus.units]]"),
        ("unit = 2", "retries = 2", 35, "no such setting; it belongs under [[serial.modbus]]"),
        ("unit = 2", "address = 2", 35, "it belongs under [[serial.modbus.units.registers]]"),
        ("unit = 2", "units = 2", 35, "no such setting; write 'unit' instead"),
        ("address = 0", "address = 65535", 26, '"f32" from 65535 would end at 65536'),
        ('table = "input"', 'table = "coil"', 28, 'is "f32", and table "coil" holds bits; write type = "bit"'),
        ('table = "coil"', 'table = "input"', 33, 'is "bit", and table "input" holds numbers'),
        ('type = "bit"', 'type = "bit"\nscale = 0.1', 34, "is for numbers, and this is a bit"),
        ('type = "bit"', 'type = "bit"\noffset = 1', 34, "is for numbers, and this is a bit"),
        ('type = "f32"', 'type = "f32"\nword_order = "AB"', 29, '"AB" will not do; write "ABCD" (as the standard'),
        ('type = "f32"', 'type = "f32"\nbyte_order = "CDAB"', 29,
         "no such setting; write word_order under [[serial.modb"),
        ('parity = "none"', 'endianness = "big"', 20,
         "no such setting; write word_order under [[serial.modbus.units.reg"),
        ('type = "bit"', 'type = "bit"\nword_order = "BADC"', 34, "word_order: is for numbers, and this is a bit"),
        ('type = "bit"', 'type = "bit"\nnull_if = [0]', 34, "null_if: is for numbers, and this is a bit"),
        ('type = "f32"', 'type = "f32"\nnull_if = [0xFFFFFFFF]', 29,
         'null_if: is for whole numbers, and this is "f32", whose NaN and infinities are null anyway; remove it'),
        ('type = "f32"', 'type = "u16"\nnull_if = 65535', 29, "65535 will not do; write a list of whole numbers"),
        ('type = "f32"', 'type = "u16"\nnull_if = ["0x8000"]', 29, "without quotes, such as [65535] or [0x8000]"),
        ('type = "f32"', 'type = "u16"\nnull_if = [0xFFFF, 65536]', 29,
         '65536 (0x10000) is no number of "u16", which has 0 to 65535; write one of these, or correct type'),
        ('type = "f32"', 'type = "u16"\nnull_if = [-32768]', 29,
         '-32768 is no number of "u16", which has 0 to 65535; write 32768, which are its bits, or type = "s16"'),
        ('type = "f32"', 'type = "u32"\nnull_if = [-1]', 29, 'write 4294967295, which are its bits, or type = "s32"'),
        ('type = "f32"', 'type = "s16"\nnull_if = [0x80000000]', 29,
         '2147483648 (0x80000000) is no number of "s16", which has -32768 to 32767, or by its bits 0 to 65535'),
        ('type = "f32"', 'type = "s64"\nnull_if = [0x10000000000000000]', 29, "a number of this size is no number of"),
        ('type = "f32"', 'type = "f32"\noffset = nan', 29, "nan is no number that can be added"),
        ('name = "open"', 'name = "volts"', 30, '"volts" is another register of this unit too'),
        ('name = "open"', 'name = ""', 30, "is empty; write what the register holds"),
        ('name = "open"\n', "", 29, 'registers[1].name is missing; write name = "volts"'),
        ("scale = 0.1", "scale = 0", 37, "0 will not do; write a number, above 0"),
        ('[{name = "celsius", address = 1, type = "s16", scale = 0.1}]', "[]", 37, "so that nothing would be read"),
        ("[[serial.modbus]]", "[serial.modbus]", 18,
         "serial.modbus: a section will not do; write [[serial.modbus]], with"),
        ("[[serial.text]]\nport = ", "[serial.text]\nport = ", 12, "each with two brackets, as in [[routes]]"),
        ('[[serial.modbus]]\nport = "/dev/ttyUSB3"\nparity = "none"\n', "", 18,
         "write [[serial.modbus]] with its port above [[serial.modbus.units]]"),
    ],
)  # fmt: skip
def test_a_mistake_of_a_serial_line_has_its_line_and_what_to_write(
    right: str, wrong: str, line: int, words: str
) -> None:
    assert SERIAL.count(right) >= 1
    text = SERIAL.replace(right, wrong, 1)
    found = mistakes(text)
    assert any(words in message and line == at for at, message in found), found


def test_the_name_of_a_format() -> None:
    section = '[[serial.format]]\nport = "/dev/ttyS2"\ndevice = "yard"\nformat = "sds011"\n'
    serial = parse(SERIAL + section, PATH).serial
    assert serial is not None
    assert (serial.format[0].format, serial.format[0].stream) == ("sds011", None)
    ((_, message),) = mistakes(SERIAL + section.replace("sds011", "SDS011"))
    assert "will not do; write 1 to 40 letters" in message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "baud = 115200",
            "remove it, or write ports, or write it below [[serial.text]], [[serial.format]] or [[serial.modbus]]",
        ),
        ("probe_interval_s = 60", "remove it, or write ports"),
        ('oscillator = "crystal"', "remove it, or write ports"),
    ],
)
def test_what_is_for_sensors_with_our_frames_needs_a_port_of_theirs(setting: str, words: str) -> None:
    with_ports = SERIAL.replace("[serial]", f"[serial]\n{setting}")
    assert parse(with_ports, PATH).serial is not None
    ((line, message),) = mistakes(with_ports.replace('ports = ["all", "/dev/ttyS1"]\n', ""))
    assert line == 6
    assert message.endswith(f"serial.ports names no port of theirs; {words}")
    # Of all lines.
    text = SERIAL.replace('ports = ["all", "/dev/ttyS1"]', 'scan_interval_s = 5\ntopic = "a/{device}/{stream}"')
    assert parse(text, PATH).serial is not None


def test_a_line_without_units_asks_nobody() -> None:
    text = SERIAL[: SERIAL.index("[[serial.modbus.units]]")]
    ((line, words),) = mistakes(text)
    assert line == 18
    assert words.endswith("units is missing; write [[serial.modbus.units]] below it, with unit, device and registers")
    assert mistakes(text + "units = []\n")[0][1].startswith("serial.modbus[0].units: is empty")
