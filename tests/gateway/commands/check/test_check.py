"""`sluice check` on topics: which it judges, and its findings with a real broker."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from demo.kafka_broker import Broker, kafka_broker
from gateway.commands.check.finding import Finding, Remark
from gateway.commands.check.kafka import (
    _absent,
    _cluster_words,
    _findings,
    _routes_without_topics,
    _silent,
    _topics_of_devices,
    _unusable,
    _with_admin_words,
    check_kafka,
    wanted_topics,
)
from gateway.config.config_file import load
from gateway.intake.routes import Destination, compile_routes
from gateway.kafka.topics import ADMIN_CONFIG, ADMIN_WORDS, UNKNOWN, Cluster, Flaw, Partition, TopicVerdict
from gateway.settings import (
    DEFAULT_ROUTE,
    CommandSettings,
    GatewaySettings,
    KafkaSaslSettings,
    KafkaSettings,
    KafkaTlsSettings,
    RouteSettings,
    Settings,
)
from gateway.tls.dates import by_system_clock
from tests.support.deadline import deadline
from tests.support.gateways import free_port, write_config
from tests.support.kafka_admin import create_topic
from tests.support.kafka_peers import FakeBroker
from tests.support.stream_server import speaking

OWN = {"gateway-events", "gateway-quarantine"}


def settings_of(*kafka: str, fallback: str | None = None, backlog: str | None = None) -> Settings:
    return Settings(
        GatewaySettings("gw1"),
        KafkaSettings(("127.0.0.1:1",), backlog_topic=backlog),
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


@pytest.mark.parametrize(
    ("backlog", "judged"),
    [
        ("{topic}.backlog", {"meters.backlog", "strays.backlog", "device-thermo.backlog"}),
        ("late-{topic}", {"late-meters", "late-strays", "late-device-thermo", "late-device-x.backlog"}),
    ],
)
def test_each_stream_has_its_backlog_topic_and_the_gateways_own_have_none(backlog: str, judged: set[str]) -> None:
    # The last is a backlog itself, where they are named so; otherwise a stream.
    existing = {"device-thermo", "device-x.backlog"}
    settings = settings_of("device-{a}", "meters", fallback="strays", backlog=backlog)
    assert wanted_topics(settings, existing) == OWN | {"meters", "strays"} | existing | judged


def test_further_topics_are_judged_for_routes_that_write_to_them() -> None:
    plain = settings_of("device-{a}", "meters", fallback="strays")
    first, second = plain.routes
    settings = structs.replace(
        plain,
        kafka=structs.replace(plain.kafka, structured_topic="{topic}.events", latest_topic="latest-{topic}"),
        routes=(structs.replace(first, envelope="both"), second),
    )
    existing = {"device-thermo", "device-thermo.events"}
    assert wanted_topics(settings, existing) == OWN | {"meters", "strays"} | existing | {
        *("latest-device-thermo", "latest-meters", "latest-strays"),
    }


@given(st.sampled_from(["{topic}.backlog", "late-{topic}", "a-{topic}-b"]), st.data())
def test_topics_that_check_made_ask_for_no_more(backlog: str, data: st.DataObject) -> None:
    settings = settings_of("device-{a}", "{a}.raw", "meters", backlog=backlog)
    existing = data.draw(st.sets(st.sampled_from(["device-a", "device-b.raw", "a.raw", "meters", "other"])))
    wanted = wanted_topics(settings, existing)
    assert wanted_topics(settings, existing | wanted) == wanted


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


def test_a_route_that_makes_a_topic_of_each_device_is_told_with_its_bound() -> None:
    settings = settings_of("device-{a}", "of.{device}")
    assert not _topics_of_devices(settings)
    creating = structs.replace(settings, kafka=structs.replace(settings.kafka, create_topics=True))
    (finding,) = _topics_of_devices(creating)
    assert (finding.result, finding.subject) == ("warning", "route to of.{device}")
    assert "kafka.topics_created_max = 1,000" in finding.words


def test_a_missing_topic_is_a_mistake_only_where_sluice_run_does_not_make_it() -> None:
    missing = TopicVerdict("meters", UNKNOWN, "create it")
    settings = settings_of()
    (found,) = _findings(missing, None, settings)
    assert not found.ok
    assert "--create-topics" in found.words
    made = structs.replace(settings.kafka, create_topics=True)
    (found,) = _findings(missing, None, structs.replace(settings, kafka=made))
    assert (found.subject, found.ok) == ("topic meters", True)
    assert found.words.startswith("does not exist yet; sluice run makes it")


def test_flaws_of_a_topic_are_findings_or_warnings() -> None:
    settings = settings_of()
    flaws = (Flaw("one disk", fails=True), Flaw("deletes by size", fails=False))
    first, grave, slight = _findings(TopicVerdict("meters", summary="short", flaws=flaws), None, settings)
    assert (grave.subject, grave.ok, grave.words) == ("topic meters", False, "one disk")
    assert (slight.subject, slight.ok, slight.words) == ("topic meters", True, "deletes by size")
    assert isinstance(slight, Remark)
    assert first.words.startswith("short; this disk has readings first, because one broker alone")
    made, *_ = _findings(TopicVerdict("meters", flaws=flaws[1:]), TopicVerdict("meters", made=True), settings)
    assert made.ok
    assert made.words.startswith("created, with LogAppendTime; this disk has readings first")
    (sound,) = _findings(TopicVerdict("meters", summary="keeps readings"), None, settings)
    assert sound.ok
    assert sound.words.startswith("keeps readings; this disk has readings first, because one broker alone")
    (safe,) = _findings(TopicVerdict("meters", summary="keeps readings", copies=2), None, settings)
    assert safe.words.startswith("keeps readings; Kafka has readings first, and this disk is spared")
    assert safe.words.endswith("as long as Kafka answers within 450 ms")
    always = structs.replace(settings, buffer=structs.replace(settings.buffer, disk_first=True))
    (disk,) = _findings(TopicVerdict("meters", summary="keeps readings", copies=2), None, always)
    assert disk.words.endswith("because buffer.disk_first is set")


def test_a_topic_that_was_there_all_the_time_is_not_called_created() -> None:
    settings = settings_of()
    (found,) = _findings(TopicVerdict("meters", summary="keeps readings"), TopicVerdict("meters"), settings)
    assert found.ok
    assert found.words.startswith("keeps readings; ")


def test_a_topic_that_waits_sends_nothing_to_the_quarantine() -> None:
    settings = settings_of()
    missing = TopicVerdict("meters", UNKNOWN, "create it")
    later = TopicVerdict("meters", "topic-not-created", "the cluster cannot just now", waits=True)
    (found,) = _findings(missing, later, settings)
    assert (found.ok, found.words) == (
        False,
        "is not written to just now: topic-not-created; the cluster cannot just now",
    )
    # A broker that did not know of it then knows it now.
    (found,) = _findings(TopicVerdict("meters", summary="keeps readings"), later, settings)
    assert found.ok


def test_a_topic_that_is_not_written_to_says_where_its_readings_go() -> None:
    refused = TopicVerdict("meters", "topic-compacted", "set cleanup.policy")
    (found,) = _findings(refused, None, settings_of())
    assert not found.ok
    assert "its readings go to the quarantine: topic-compacted; set cleanup.policy" in found.words
    missing = TopicVerdict("meters", UNKNOWN, "create it")
    (found,) = _findings(missing, TopicVerdict("meters", "topic-not-created", "no right"), settings_of())
    assert "topic-not-created; no right" in found.words


def beside(*kafka: str) -> Settings:
    """Settings with routes whose readings have events beside them."""
    plain = settings_of(*kafka)
    return structs.replace(plain, routes=tuple(structs.replace(route, envelope="both") for route in plain.routes))


def test_a_topic_of_events_is_no_place_of_readings() -> None:
    settings = beside("meters")
    (refused,) = _findings(TopicVerdict("structured-meters", "topic-compacted", "mend it"), None, settings)
    assert refused.words == "is not written to, so its events are left out: topic-compacted; mend it"
    (sound,) = _findings(TopicVerdict("structured-meters", summary="keeps readings", copies=2), None, settings)
    assert sound.words.startswith("keeps readings; it has further records of readings")


@pytest.mark.parametrize(
    "settings",
    [
        settings_of("structured-meters", "meters"),
        settings_of("structured-{a}"),
        beside("meters", "structured-meters"),
        settings_of("structured-a-{a}", fallback="structured-meters"),
    ],
)
def test_a_routes_own_topic_is_a_place_of_readings_whatever_its_name(settings: Settings) -> None:
    (refused,) = _findings(TopicVerdict("structured-meters", "topic-compacted", "mend it"), None, settings)
    assert refused.words == "is not written to, so its readings go to the quarantine: topic-compacted; mend it"
    (sound,) = _findings(TopicVerdict("structured-meters", summary="keeps readings", copies=2), None, settings)
    assert sound.words.startswith("keeps readings; Kafka has readings first")


def test_a_topic_that_a_route_without_events_makes_has_further_topics_whatever_its_name() -> None:
    settings = settings_of("{a}.raw", backlog="{topic}.late")
    existing = {"structured-x.raw"}
    assert wanted_topics(settings, existing) == OWN | existing | {"structured-x.raw.late"}


def test_the_words_on_the_admins_commands_come_once() -> None:
    none = Finding("topic a", ok=False, words="kafka-acls.sh --add")
    assert _with_admin_words([none]) == [none]
    command = f"x; kafka-acls.sh {ADMIN_CONFIG} --add"
    first, second = Finding("topic b", ok=False, words=command), Remark("topic c", ok=True, words=command)
    told = Finding("topic b", ok=False, words=f"{command} ({ADMIN_WORDS})")
    # It is no check of its own, and no line of its own.
    assert _with_admin_words([none, first, second]) == [none, told, second]


def test_brokers_that_are_down_are_told() -> None:
    replicas = {"t": (0, (Partition(0, 1, (1, 2, 3), (1, 2)),))}
    addresses = {1: ("a", 9092), 2: ("b", 9092)}
    degraded = Cluster("c", addresses, replicas)
    assert _cluster_words(degraded) == "its cluster has 3 brokers, 2 of them up"
    (absent,) = _absent(degraded)
    assert isinstance(absent, Remark)
    assert absent.words.startswith("down: 3; ")
    whole = Cluster("c", {**addresses, 3: ("c", 9092)}, replicas)
    assert _cluster_words(whole) == "its cluster has 3 brokers, all of them up"
    assert _absent(whole) == []
    assert "on one disk only" in _cluster_words(Cluster("c", {1: ("a", 9092)}, {}))


async def test_brokers_that_are_not_there_are_told_each_with_what_is_wrong() -> None:
    settings = settings_of("meters")
    (finding,) = await check_kafka(settings, create=False)
    assert (finding.subject, finding.code, finding.ok) == ("Kafka at 127.0.0.1:1", "kafka-unreached", False)
    assert "nothing listens at 127.0.0.1:1" in finding.words
    assert "kafka.bootstrap" in finding.words
    two = structs.replace(settings.kafka, bootstrap=("127.0.0.1:1", "127.0.0.1:2"))
    (finding,) = await check_kafka(structs.replace(settings, kafka=two), create=False)
    first, second = sorted(finding.words.removeprefix("cannot be reached: ").split("right? And "))
    assert first.startswith("nothing listens at 127.0.0.1:1; is the broker up")
    assert second.startswith("nothing listens at 127.0.0.1:2; is the broker up")


async def test_a_dead_entry_of_bootstrap_is_warned_of_though_another_answers() -> None:
    async with speaking(FakeBroker()) as port:
        settings = settings_of("meters")
        good = f"127.0.0.1:{port}"
        kafka = structs.replace(settings.kafka, bootstrap=("127.0.0.1:1", good, "127.0.0.1:2"))
        dead, other = await _silent(kafka.bootstrap, structs.replace(settings, kafka=kafka), by_system_clock)
        assert await _silent((good,), structs.replace(settings, kafka=kafka), by_system_clock) == []
    assert isinstance(dead, Remark)
    assert (dead.subject, dead.ok) == ("kafka.bootstrap", True)
    assert dead.words == (
        "only its other addresses lead to Kafka; 127.0.0.1:1 cannot be reached: nothing listens at 127.0.0.1:1; is "
        "the broker up, and are host and port in kafka.bootstrap right?"
    )
    assert "127.0.0.1:2 cannot be reached" in other.words


async def test_entries_of_bootstrap_that_say_nothing_are_waited_for_side_by_side() -> None:
    trying = 0
    all_try = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        nonlocal trying
        trying += 1
        if trying == 2:
            all_try.set()
        # Whoever is tried first is let go when the other is tried as well.
        await all_try.wait()

    async with speaking(say_nothing) as first, speaking(say_nothing) as second:
        settings = settings_of("meters")
        kafka = structs.replace(settings.kafka, bootstrap=(f"127.0.0.1:{first}", f"127.0.0.1:{second}"))
        with deadline():
            found = await _silent(kafka.bootstrap, structs.replace(settings, kafka=kafka), by_system_clock)
    assert len(found) == 2
    assert all_try.is_set()
    assert "is reached, and cannot be used" in found[0].words


async def test_a_broker_that_is_reached_and_cannot_be_used_has_a_code_of_its_own() -> None:
    async def hang_up(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0)

    settings = settings_of("meters")
    async with speaking(hang_up) as port:
        kafka = structs.replace(settings.kafka, bootstrap=(f"127.0.0.1:{port}",))
        (finding,) = await check_kafka(structs.replace(settings, kafka=kafka), create=False)
    assert finding.words.startswith("is reached, and cannot be used")
    assert finding.code == "kafka-unusable"
    # The same, if another address of the cluster answers, and sends us there.
    async with speaking(hang_up) as port, speaking(FakeBroker(advertised=("127.0.0.1", port))) as bootstrap:
        kafka = structs.replace(settings.kafka, bootstrap=(f"127.0.0.1:{bootstrap}",))
        whole, broker = await check_kafka(structs.replace(settings, kafka=kafka), create=False)
    assert (whole.code, broker.code) == ("kafka-unusable", "kafka-broker-unusable")
    assert whole.words.startswith("answers, but this box can use none of its brokers")
    assert broker.words.startswith("is reached, and cannot be used")


async def test_a_password_that_cannot_be_read_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    settings = settings_of("meters")
    sasl = KafkaSaslSettings("SCRAM-SHA-512", "ditch", tmp_path / "password")
    kafka = structs.replace(settings.kafka, sasl=sasl)
    (finding,) = await check_kafka(structs.replace(settings, kafka=kafka), create=False)
    assert not finding.ok
    # What is wrong with the file and what to do was said by the look at this box.
    assert finding.words == "not tried: kafka.sasl.password_file cannot be used, see above"


async def test_a_certificate_that_cannot_be_read_is_not_told_twice(tmp_path: Path) -> None:
    settings = settings_of("meters")
    kafka = structs.replace(settings.kafka, tls=KafkaTlsSettings(ca=tmp_path / "ca.pem"))
    (finding,) = await check_kafka(structs.replace(settings, kafka=kafka), create=False)
    assert (finding.ok, finding.words) == (False, "not tried: kafka.tls.ca cannot be used, see above")
    # What the look at this box cannot have said is told whole.
    assert _unusable("kafka.tls: no cipher; check tls.ca") == "kafka.tls: no cipher; check tls.ca"


@pytest.mark.kafka
async def test_a_broker_whose_advertised_address_leads_nowhere_is_a_finding(tmp_path: Path) -> None:
    nowhere = free_port()
    with kafka_broker(tmp_path, gateway_port=nowhere) as broker:
        settings = settings_of("meters")
        kafka = structs.replace(settings.kafka, bootstrap=(f"127.0.0.1:{broker.gateway_listener_port}",))
        answering, unreached = await check_kafka(structs.replace(settings, kafka=kafka), create=False)
    assert not answering.ok
    assert "reaches none of its brokers" in answering.words
    assert (answering.code, unreached.code) == ("kafka-unreached", "kafka-broker-unreached")
    assert (unreached.subject, unreached.ok) == (f"Kafka's broker 1 at 127.0.0.1:{nowhere}", False)
    assert unreached.words.startswith(f"cannot be reached: nothing listens at 127.0.0.1:{nowhere}; a broker gave this")
    assert "; set advertised.listeners of that broker" in unreached.words


@pytest.mark.kafka
async def test_one_address_that_answers_is_enough(kafka: Broker) -> None:
    settings = settings_of("enough")
    uplink = structs.replace(settings.kafka, bootstrap=("127.0.0.1:1", kafka.bootstrap))
    answering, dead, *topics = await check_kafka(structs.replace(settings, kafka=uplink), create=False)
    assert answering.ok
    assert (dead.subject, dead.ok, type(dead)) == ("kafka.bootstrap", True, Remark)
    assert "127.0.0.1:1 cannot be reached" in dead.words
    assert {finding.subject for finding in topics} == {f"topic {name}" for name in ("enough", *OWN)}


@pytest.mark.kafka
async def test_backlog_topics_are_made_beside_the_others(kafka: Broker) -> None:
    settings = settings_of("beside", backlog="{topic}.backlog")
    uplink = structs.replace(settings.kafka, bootstrap=(kafka.bootstrap,), events_topic="b-e", quarantine_topic="b-q")
    found = await check_kafka(structs.replace(settings, kafka=uplink), create=True)
    assert all(finding.ok for finding in found)
    assert {finding.subject for finding in found[1:]} == {
        f"topic {name}" for name in ("b-e", "b-q", "beside", "beside.backlog")
    }


@pytest.mark.kafka
async def test_check_judges_what_this_gateway_writes_to_and_nothing_else(kafka: Broker, tmp_path: Path) -> None:
    settings = load(write_config(tmp_path, kafka.bootstrap, free_port(), "check"))
    await create_topic(kafka.bootstrap, "check-good")
    for topic in ("check-bad", "__check-internal", "unchecked"):
        await create_topic(kafka.bootstrap, topic, message_timestamp_type="CreateTime")

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
    assert after["topic check-events"].words.startswith("created, with LogAppendTime; Kafka has readings first")
    assert [finding.subject for finding in after.values() if not finding.ok] == ["topic check-bad"]


@pytest.mark.kafka
async def test_a_template_that_says_nothing_judges_no_topic_of_others(kafka: Broker, tmp_path: Path) -> None:
    config = write_config(tmp_path, kafka.bootstrap, free_port(), "alone")
    config.write_text(config.read_text().replace('"alone-{stream}"', '"{stream}"'))
    await create_topic(kafka.bootstrap, "somebodys", message_timestamp_type="CreateTime")
    findings = await check_kafka(load(config), create=True)
    assert [finding.subject for finding in findings[1:]] == ["topic alone-events", "topic alone-quarantine"]
    assert all(finding.ok for finding in findings)


@pytest.mark.kafka
async def test_the_topic_of_commands_is_made_like_the_others_or_awaited(kafka: Broker) -> None:
    commands = CommandSettings(("*",), topic="made-commands.{gateway}")
    settings = structs.replace(settings_of(), commands=commands)
    uplink = structs.replace(settings.kafka, bootstrap=(kafka.bootstrap,), events_topic="m-e", quarantine_topic="m-q")

    async def words(*, makes: bool, create: bool) -> str:
        by = structs.replace(settings, kafka=structs.replace(uplink, create_topics=makes))
        found = {finding.subject: finding.words for finding in await check_kafka(by, create=create)}
        return found["topic made-commands.gw1"]

    assert "there is no topic made-commands.gw1" in await words(makes=False, create=False)
    assert (await words(makes=True, create=False)).startswith("does not exist yet; sluice run makes it")
    assert (await words(makes=False, create=True)).startswith("commands are read from it")
    assert (await words(makes=False, create=False)).startswith("commands are read from it")
