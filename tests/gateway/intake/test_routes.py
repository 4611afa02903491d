"""Topics to Kafka topics and keys, as the settings' templates say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.intake.routes import Destination, Refusal, RouteError, RouteTable, compile_route, compile_routes
from gateway.record_contract import KAFKA_TOPIC
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


@given(st.text(max_size=30))
def test_any_topic_gets_a_destination_that_kafka_takes_or_a_reason(topic: str) -> None:
    routes = table(("device/{device}/{stream}", "device-{stream}"), ("{device}/#", "rest"))
    found = routes.resolve(topic, None)
    assert isinstance(found, Refusal) or KAFKA_TOPIC.fullmatch(found.kafka_topic)
