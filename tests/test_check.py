"""`sluice check`: which topics it judges, and what a real broker lets it say of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from demo.kafka_broker import Broker
from gateway.check import _finding, _routes_without_topics, check_kafka, wanted_topics
from gateway.config_file import load
from gateway.kafka_topics import UNKNOWN, TopicVerdict
from gateway.routes import Destination, compile_routes
from gateway.settings import DEFAULT_ROUTE, GatewaySettings, KafkaSettings, RouteSettings, Settings
from tests.gateways import create_topic, free_port, write_config

OWN = {"gateway-events", "gateway-quarantine"}


def settings_of(*kafka: str, fallback: str | None = None) -> Settings:
    return Settings(
        GatewaySettings("gw1"),
        KafkaSettings(("127.0.0.1:1",)),
        routes=tuple(RouteSettings("{device}/{a}/{b}", template) for template in kafka),
        fallback_topic=fallback,
    )


def test_topics_without_variables_are_judged_whether_they_exist_or_not() -> None:
    assert wanted_topics(settings_of("meters", fallback="strays"), set()) == OWN | {"meters", "strays"}


@pytest.mark.parametrize(
    ("template", "judged"),
    [
        (DEFAULT_ROUTE.kafka, {"device-thermo", "device-a.b"}),
        ("{a}.raw", {"thermo.raw", "north-thermo.raw"}),
        ("north-{a}.{b}", {"north-thermo.raw"}),
        ("device-{a}", {"device-thermo", "device-a.b"}),
        ("device-{a}{b}", {"device-thermo", "device-a.b"}),
        # A dot stands for itself, and a variable for one character at least.
        ("device.{a}", set()),
        ("device-thermo{a}", set()),
        ("{a}o.raw", {"thermo.raw", "north-thermo.raw"}),
        # These could be anybody's topics.
        ("{a}", set()),
        ("{a}.{b}", set()),
        ("__{a}", set()),
    ],
)
def test_topics_of_a_template_are_those_that_exist_and_have_its_shape(template: str, judged: set[str]) -> None:
    existing = {"device-thermo", "device-a.b", "device-", "thermo.raw", "north-thermo.raw", "other"}
    existing |= {"__consumer_offsets", "__transaction_state", "__x.raw"}
    assert wanted_topics(settings_of(template), existing) == OWN | judged


NAMES = st.text(st.sampled_from("ab.-"), min_size=1, max_size=6)


@given(st.sampled_from(["a-{a}", "{a}b", "a{a}-{b}", "a{a}{b}", "a{a}.b{b}-", "{a}-{device}-{b}a"]), NAMES, NAMES)
def test_what_a_route_can_make_is_judged(template: str, first: str, second: str) -> None:
    settings = settings_of(template)
    made = compile_routes(settings.routes, None, frozenset()).resolve(f"d/{first}/{second}", None)
    assert isinstance(made, Destination)
    assert made.kafka_topic in wanted_topics(settings, {made.kafka_topic})


@pytest.mark.timeout(20)
def test_no_name_in_the_cluster_makes_the_match_slow() -> None:
    existing = {"a" * 249, "-a" * 124}
    template = "{device}-" + "{a}a{b}-" * 6 + "x"
    assert wanted_topics(settings_of(template), existing) == OWN


def test_a_route_whose_topics_nobody_made_is_a_finding_before_the_first_reading_goes_aside() -> None:
    settings = settings_of("device-{a}", "meters", "{a}")
    (finding,) = _routes_without_topics(settings, {"meters"})
    assert finding.subject == "route to device-{a}"
    assert not _routes_without_topics(settings, {"meters", "device-thermo"})
    creating = structs.replace(settings, kafka=structs.replace(settings.kafka, create_topics=True))
    assert not _routes_without_topics(creating, {"meters"})


def test_a_missing_topic_is_a_mistake_only_where_sluice_run_does_not_make_it() -> None:
    missing = TopicVerdict("meters", UNKNOWN, "create it")
    kafka = settings_of().kafka
    found = _finding(missing, None, kafka)
    assert not found.ok
    assert "--create-topics" in found.words
    found = _finding(missing, None, structs.replace(kafka, create_topics=True))
    assert (found.subject, found.ok) == ("topic meters", True)
    assert found.words.startswith("does not exist yet; sluice run makes it")


async def test_a_broker_that_is_not_there_is_a_finding() -> None:
    (finding,) = await check_kafka(settings_of("meters"), create=False)
    assert (finding.subject, finding.ok) == ("Kafka at 127.0.0.1:1", False)
    assert "is kafka.bootstrap right, and is the broker up?" in finding.words


@pytest.mark.kafka
async def test_check_judges_what_this_gateway_writes_to_and_nothing_else(kafka: Broker, tmp_path: Path) -> None:
    settings = load(write_config(tmp_path, kafka.bootstrap, free_port(), "check"))
    await create_topic(kafka.bootstrap, "check-good", **{"message.timestamp.type": "LogAppendTime"})
    for topic in ("check-bad", "__check-internal", "unchecked"):
        await create_topic(kafka.bootstrap, topic, **{"message.timestamp.type": "CreateTime"})

    fresh = {finding.subject: finding for finding in await check_kafka(settings, create=False)}
    assert [finding.subject for finding in fresh.values() if not finding.ok] == ["topic check-bad"]
    assert fresh["topic check-events"].words.startswith("does not exist yet; sluice run makes it")

    by_hand = structs.replace(settings, kafka=structs.replace(settings.kafka, create_topics=False))
    before = {finding.subject: finding for finding in await check_kafka(by_hand, create=False)}
    assert {subject for subject in before if "check" in subject} == {
        "topic check-bad",
        "topic check-events",
        "topic check-good",
        "topic check-quarantine",
    }
    assert [finding.subject for finding in before.values() if finding.ok] == [
        f"Kafka at {kafka.bootstrap}",
        "topic check-good",
    ]
    assert "retention would delete" in before["topic check-bad"].words
    assert "--create-topics" in before["topic check-events"].words

    after = {finding.subject: finding for finding in await check_kafka(settings, create=True)}
    assert after["topic check-events"].words == "created, with LogAppendTime"
    assert [finding.subject for finding in after.values() if not finding.ok] == ["topic check-bad"]


@pytest.mark.kafka
async def test_a_template_that_says_nothing_judges_no_topic_of_others(kafka: Broker, tmp_path: Path) -> None:
    config = write_config(tmp_path, kafka.bootstrap, free_port(), "alone")
    config.write_text(config.read_text().replace('"alone-{stream}"', '"{stream}"'))
    await create_topic(kafka.bootstrap, "somebodys", **{"message.timestamp.type": "CreateTime"})
    findings = await check_kafka(load(config), create=True)
    assert [finding.subject for finding in findings[1:]] == ["topic alone-events", "topic alone-quarantine"]
    assert all(finding.ok for finding in findings)
