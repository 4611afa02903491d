"""Topics to Kafka topics and keys, as the settings' templates say."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.intake.routes import Destination, Refusal, RouteError, RouteTable, compile_route, compile_routes
from gateway.record_contract import DEVICE_NAME, DEVICE_PATH, KAFKA_TOPIC
from gateway.settings import DEFAULT_ROUTE, RouteSettings

RESERVED = frozenset({"gateway-events", "gateway-quarantine"})


def table(*routes: tuple[str, str], fallback: str | None = None) -> RouteTable:
    return compile_routes([RouteSettings(topic, kafka) for topic, kafka in routes], fallback, RESERVED)


def destination(found: Destination | Refusal) -> tuple[str, str]:
    assert isinstance(found, Destination)
    return found.kafka_topic, found.device


def test_static_parts_name_the_kafka_topic_and_the_device_is_the_key() -> None:
    routes = compile_routes([DEFAULT_ROUTE], None, RESERVED)
    assert destination(routes.resolve("device/42/thermo", None)) == ("device-thermo", "42")


def test_several_variables_and_wildcards() -> None:
    routes = table(("site/{site}/+/{device}/{stream}/#", "{site}.{stream}"))
    assert destination(routes.resolve("site/north/floor2/42/thermo/raw/v1", None)) == ("north.thermo", "42")
    assert destination(routes.resolve("site/north/floor2/42/thermo", None)) == ("north.thermo", "42")


@pytest.mark.parametrize(
    ("topic", "writer", "reason"),
    [
        ("kitchen/42", None, "no-route"),
        ("device/42", None, "no-route"),
        ("device/42/thermo/x", None, "no-route"),
        ("device//thermo", None, "no-route"),
        ("device/4 2/thermo", None, "device-name-invalid"),
        ("device/42/ther mo", None, "kafka-topic-name-invalid"),
        ("device/42/thermo", "43", "not-the-writers-device"),
    ],
)
def test_what_has_no_destination_says_why(topic: str, writer: str | None, reason: str) -> None:
    routes = compile_routes([DEFAULT_ROUTE], None, RESERVED)
    assert routes.resolve(topic, writer) == Refusal(reason)


def test_two_routes_that_disagree_are_ambiguous_and_two_that_agree_are_not() -> None:
    routes = table(("device/{device}/{stream}", "device-{stream}"), ("device/{device}/thermo", "thermo"))
    assert routes.resolve("device/42/thermo", None) == Refusal("ambiguous-route")
    assert destination(routes.resolve("device/42/light", None)) == ("device-light", "42")
    agreeing = table(("device/{device}/{stream}", "device-{stream}"), ("device/{device}/thermo", "device-thermo"))
    assert destination(agreeing.resolve("device/42/thermo", None)) == ("device-thermo", "42")


def test_routes_that_differ_in_their_variables_alone_agree_and_the_first_tells_them() -> None:
    routes = table(("device/{device}/{stream}", "readings"), ("device/{device}/thermo", "readings"))
    found = routes.resolve("device/42/thermo", None)
    assert destination(found) == ("readings", "42")
    assert isinstance(found, Destination)
    assert found.variables == (("device", "42"), ("stream", "thermo"))


def test_the_fallback_takes_what_no_route_matches() -> None:
    routes = table(("device/{device}/{stream}", "device-{stream}"), fallback="strays")
    assert destination(routes.resolve("kitchen/lamp", "42")) == ("strays", "42")
    assert destination(routes.resolve("kitchen/lamp", None)) == ("strays", "kitchen/lamp")


def test_no_sensor_may_speak_for_the_gateway() -> None:
    routes = table(("{kind}/{device}", "gateway-{kind}"))
    assert routes.resolve("events/42", None) == Refusal("kafka-topic-reserved")


def test_no_sensor_may_write_where_kafka_keeps_its_own() -> None:
    routes = table(("{device}/{stream}", "{stream}"))
    assert routes.resolve("42/__consumer_offsets", None) == Refusal("kafka-topic-reserved")
    assert destination(routes.resolve("42/_thermo", None)) == ("_thermo", "42")


@pytest.mark.parametrize(
    ("topic", "kafka", "words"),
    [
        ("device/thermo", "thermo", "{device} once"),
        ("{device}/{device}", "thermo", "{device} once"),
        ("{device}/{a}/{a}", "thermo", "twice"),
        ("#/{device}", "thermo", "last level"),
        ("dev{device}/x", "thermo", "mixes text"),
        ("{device}/x", "thermo-{stream}", "{stream}"),
        ("{device}/x", "ther mo", "no topic name"),
    ],
)
def test_a_template_that_cannot_work_is_refused(topic: str, kafka: str, words: str) -> None:
    with pytest.raises(RouteError, match="(?i)" + words.replace("{", r"\{").replace("}", r"\}")):
        compile_route(RouteSettings(topic, kafka))


NAMED = RouteSettings("zigbee2mqtt/Living room", "zigbee", device="living-room")
ESCAPING = RouteSettings("zigbee2mqtt/{device}", "zigbee", names="escape")
OF_SITES = RouteSettings("{site}/{device}/{stream}", "device-{stream}", key="{site}/{device}")


def route_table(*routes: RouteSettings) -> RouteTable:
    return compile_routes(routes, None, RESERVED)


def found_at(routes: RouteTable, topic: str, writer: str | None = None) -> Destination:
    found = routes.resolve(topic, writer)
    assert isinstance(found, Destination), found
    return found


@pytest.mark.parametrize("routes", [(NAMED, ESCAPING), (ESCAPING, NAMED)])
def test_a_route_that_names_the_device_goes_before_those_that_do_not(routes: tuple[RouteSettings, ...]) -> None:
    table = route_table(*routes)
    named, other = found_at(table, "zigbee2mqtt/Living room"), found_at(table, "zigbee2mqtt/Küche")
    assert (named.device, named.variables) == ("living-room", ())
    assert (other.device, other.variables) == ("x--K-C3BC-che", (("device", "Küche"),))
    # It does so as well where the other could not take the topic at all.
    refusing = route_table(NAMED, replace(ESCAPING, names="refuse"))
    assert found_at(refusing, "zigbee2mqtt/Living room") == named
    assert refusing.resolve("zigbee2mqtt/Küche", None) == Refusal("device-name-invalid")


def test_two_routes_that_name_a_topics_device_differently_are_ambiguous() -> None:
    routes = route_table(NAMED, replace(NAMED, topic="zigbee2mqtt/+", device="any"))
    assert routes.resolve("zigbee2mqtt/Living room", None) == Refusal("ambiguous-route")
    assert found_at(routes, "zigbee2mqtt/Bad").device == "any"


def test_the_devices_own_user_alone_writes_as_a_device_that_a_route_names() -> None:
    routes = route_table(NAMED, OF_SITES)
    assert found_at(routes, "zigbee2mqtt/Living room", "living-room").device == "living-room"
    assert routes.resolve("zigbee2mqtt/Living room", "attic") == Refusal("not-the-writers-device")
    # No user is called `north/42`: else 42 of one site could write as that of any other.
    assert routes.resolve("north/42/thermo", "42") == Refusal("not-the-writers-device")


def test_a_setting_makes_equal_names_of_two_sites_two_devices() -> None:
    routes = route_table(OF_SITES)
    north, south = found_at(routes, "north/42/thermo"), found_at(routes, "south/42/thermo")
    assert (north.device, south.device) == ("north/42", "south/42")
    # The key says the site, and the Kafka topic says the stream.
    assert north.variables == ()
    assert routes.resolve("no rth/42/thermo", None) == Refusal("device-name-invalid")
    escaped = found_at(route_table(replace(OF_SITES, names="escape")), "no rth/42/thermo")
    assert escaped.device == "x--no-20-rth/42"
    assert escaped.variables == (("site", "no rth"), ("device", "42"), ("stream", "thermo"))


@pytest.mark.parametrize(
    ("route", "topic", "variables"),
    [
        (DEFAULT_ROUTE, "device/42/thermo", None),
        (replace(DEFAULT_ROUTE, names="escape"), "device/42/thermo", None),
        (replace(DEFAULT_ROUTE, names="escape"), "device/4 2/thermo", {"device": "4 2", "stream": "thermo"}),
        (replace(DEFAULT_ROUTE, names="escape"), "device/42/ther mo", {"device": "42", "stream": "ther mo"}),
        (replace(DEFAULT_ROUTE, kafka="all"), "device/42/thermo", {"device": "42", "stream": "thermo"}),
        (replace(OF_SITES, key="{device}"), "north/42/t", {"site": "north", "device": "42", "stream": "t"}),
        # Of `a-b-c` nobody knows where the site ends.
        (
            replace(OF_SITES, kafka="{site}-{stream}", key="{device}"),
            "a-b/42/c",
            {"site": "a-b", "device": "42", "stream": "c"},
        ),
        (replace(OF_SITES, kafka="{site}", key="{device}", topic="{site}/{device}/t"), "north/42/t", None),
        (RouteSettings("hall/{floor}/rain", "rain", device="rain"), "hall/é 1/rain", {"floor": "é 1"}),
        (
            RouteSettings("hall/{floor}/rain", "rain-{device}", device="rain", names="escape"),
            "hall/1/rain",
            {"floor": "1"},
        ),
    ],
)
def test_variables_go_along_where_neither_key_nor_kafka_topic_says_them(
    route: RouteSettings, topic: str, variables: dict[str, str] | None
) -> None:
    assert dict(found_at(route_table(route), topic).variables) == (variables or {})


def test_what_stands_in_the_kafka_topic_is_escaped_too() -> None:
    routes = route_table(RouteSettings("{device}/{stream}", "device-{stream}", names="escape"))
    assert destination(routes.resolve("42/Küche 1", None)) == ("device-x--K-C3BC-che-20-1", "42")
    assert routes.resolve(f"42/{'ü' * 70}", None) == Refusal("kafka-topic-name-invalid")


@pytest.mark.parametrize(("name", "fits"), [("ü" * 14, True), ("ü" * 15, False), ("a" * 63, True), ("a" * 64, False)])
def test_an_escaped_name_that_is_too_long_is_refused_as_that(name: str, fits: bool) -> None:  # noqa: FBT001 - a case
    found = route_table(ESCAPING).resolve(f"zigbee2mqtt/{name}", None)
    assert (found == Refusal("device-name-too-long")) is not fits
    assert not isinstance(found, Destination) or DEVICE_NAME.fullmatch(found.device)


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_two_topics_make_one_device_unless_their_names_are_equal(one: str, other: str) -> None:
    routes = route_table(replace(OF_SITES, names="escape"))
    first, second = (routes.resolve(f"{topic}/t", None) for topic in (one, other))
    if isinstance(first, Destination) and isinstance(second, Destination):
        assert (first.device == second.device) == (one == other)
        assert DEVICE_PATH.fullmatch(first.device)


@pytest.mark.parametrize(
    ("route", "setting", "words"),
    [
        (replace(NAMED, topic="a/{device}"), "device", "remove that, or the setting device"),
        (RouteSettings("a/b", "k"), "topic", 'write device = "NAME" instead'),
        (replace(NAMED, names="escape"), "names", "there is no name to escape"),
        (
            replace(NAMED, key="{site}/{device}"),
            "key",
            "uses {site}, which topic 'zigbee2mqtt/Living room' does not hold",
        ),
        (replace(OF_SITES, key="{site}"), "key", "must hold {device} once, as in '{site}/{device}'"),
        (replace(OF_SITES, key="{site}-{device}"), "key", "must hold {device} once, as in '{site}/{device}'"),
        (replace(OF_SITES, key="a b/{device}"), "key", "'a b' will not do: between its '/' stand a '{variable}' alone"),
        (replace(OF_SITES, key="{site}{stream}/{device}"), "key", "'{site}{stream}' will not do"),
        (replace(OF_SITES, key="/{device}"), "key", "'' will not do"),
        (replace(OF_SITES, kafka="{hall}"), "kafka", "uses {hall}, which topic"),
    ],
)
def test_names_and_keys_that_cannot_work_are_refused(route: RouteSettings, setting: str, words: str) -> None:
    with pytest.raises(RouteError, match=re.escape(words)) as raised:
        compile_route(route)
    assert raised.value.setting == setting


@given(st.text(max_size=30))
def test_any_topic_gets_a_destination_that_kafka_takes_or_a_reason(topic: str) -> None:
    routes = table(("device/{device}/{stream}", "device-{stream}"), ("{device}/#", "rest"))
    found = routes.resolve(topic, None)
    assert isinstance(found, Refusal) or KAFKA_TOPIC.fullmatch(found.kafka_topic)


def test_no_route_leads_to_a_topic_of_last_readings() -> None:
    made = [RouteSettings("{device}/{stream}", "{stream}")]
    routes = compile_routes(made, None, RESERVED, is_latest=lambda topic: topic.endswith(".latest"))
    assert routes.resolve("42/thermo.latest", None) == Refusal("kafka-topic-reserved")
    assert found_at(routes, "42/thermo").kafka_topic == "thermo"


def test_an_event_has_all_variables_under_names_of_their_own() -> None:
    route = RouteSettings("{site}/{device}/{stream}", "device-{stream}", key="{site}/{device}", envelope="both")
    found = found_at(compile_routes([route], None, RESERVED), "north/42/thermo")
    assert (found.variables, found.envelope) == ((), "both")
    assert found.all_variables == (("site", "north"), ("device", "42"), ("stream", "thermo"))
    alike = replace(route, topic="{a_b}/{ab}/{device}/{stream}", key="{device}")
    with pytest.raises(RouteError, match="differ in '_' alone"):
        compile_route(alike)
    assert compile_route(replace(alike, envelope="binary"))
