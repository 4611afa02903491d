"""The daemon behind a path that fails: whatever it was, new readings flow within 15 s, and all of them arrive.

Gateway, router and brokers stand in network namespaces (`netns`); sensors go on publishing all the time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.support.netns import BROKERS_NET, BROKERS_NET6
from tests.support.uplink_scene import (
    FAULTS,
    RECOVERY_S_MAX,
    Outcome,
    RunningGateway,
    Scene,
    running_gateway,
    scene_or_skip,
)
from tests.support.waiting import patience

pytestmark = pytest.mark.kafka

CPU_SHARE_MAX = 0.4
"""Most share of one core while the uplink is down. Taking readings in costs a tenth of that. Trying again without a
pause would take a whole core."""
TEXTS_MAX = 3
"""Times that one outage may log the same text: once for a state, and once more if the state was left and entered
again."""
LINES_MAX = 15
"""Lines of the log that one outage may cost in all."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_or_skip(tmp_path_factory.mktemp("uplink")) as made:
        yield made


@pytest.fixture(autouse=True)
def mended(scene: Scene) -> Iterator[None]:
    """A test that fails in the middle of a fault must not cost the next one."""
    yield
    scene.ip_versions = (4,)
    scene.mend()


@dataclass(slots=True)
class Outage:
    """A fault and its end."""

    begin_s: float
    """When it began (Unix time)."""
    back_s: float = 0.0
    """When the path was back (Unix time)."""


@contextmanager
def outage(running: RunningGateway, fault: str) -> Iterator[Outage]:
    """A fault for the length of a `with`, and what the daemon may do meanwhile: be patient, and say little."""
    time.sleep(1.5)
    lines = len(running.log_lines())
    begin_s, begin_cpu_s = time.time(), running.cpu_s()
    suffered = Outage(begin_s)
    FAULTS[fault].begin(running.scene)
    yield suffered
    cpu_s, took_s = running.cpu_s() - begin_cpu_s, time.time() - begin_s
    FAULTS[fault].end(running.scene)
    suffered.back_s = time.time()
    running.wait_until_calm(RECOVERY_S_MAX + 10)
    # Where all is calm at once, readings have to be taken in yet that `judge` can look for.
    time.sleep(max(0.0, suffered.back_s + 1 - time.time()))
    said = running.log_texts(lines)
    print(f"{fault}: {cpu_s:.2f} s of CPU in {took_s:.1f} s; the log: {dict(said)}")  # noqa: T201 - with -s
    assert cpu_s <= CPU_SHARE_MAX * max(took_s, 2.0), f"{cpu_s:.2f} s of CPU in {took_s:.1f} s of {fault}: a hot loop"
    assert max(said.values(), default=0) <= TEXTS_MAX, f"a line for each attempt: {said}"
    assert said.total() <= LINES_MAX, f"too many lines for one outage: {said}"


def judge(running: RunningGateway, back_s: float) -> Outcome:
    """All drained, the ledger right, and new readings as soon as promised, with patience for a busy machine."""
    outcome = running.finish()
    recovery_s = outcome.recovery_s(back_s)
    print(f"a new reading was in Kafka {recovery_s:.1f} s after the path was back; {outcome.audit}")  # noqa: T201
    assert not outcome.audit.faults, str(outcome.audit)
    assert recovery_s <= patience(RECOVERY_S_MAX), (
        f"no new reading for {recovery_s:.1f} s; the log: {running.log_texts()}"
    )
    return outcome


def go_through(scene: Scene, fault: str, seconds: float) -> float:
    """A fault of so many seconds; give how long after it a new reading was in Kafka."""
    with running_gateway(scene) as running:
        with outage(running, fault) as suffered:
            time.sleep(seconds)
        return judge(running, suffered.back_s).recovery_s(suffered.back_s)


@pytest.mark.alone
@pytest.mark.parametrize(("fault", "seconds"), [("address-changed", 0.5), ("dns-dead", 8)])
def test_new_readings_are_in_kafka_within_the_promised_time(scene: Scene, fault: str, seconds: float) -> None:
    """Waiting is what it consists of, not work: with no other test beside it, it needs no allowance."""
    assert go_through(scene, fault, seconds) <= RECOVERY_S_MAX


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        pytest.param("interface-changed", 0.5, marks=pytest.mark.long(seconds=10)),
        ("link-down", 6),
        pytest.param("broker-moved", 5, marks=pytest.mark.long(seconds=15)),
    ],
)
def test_after_an_outage(scene: Scene, fault: str, seconds: float) -> None:
    go_through(scene, fault, seconds)


@pytest.mark.parametrize(
    ("fault", "seconds", "words"),
    [
        # So long that a connection which is not given up waits longer than it may for its next retransmission.
        ("blackhole", 20, ""),
        ("name-unknown", 14, "kafka.example does not resolve"),
    ],
)
def test_an_outage_that_lasts_is_told_in_words(scene: Scene, fault: str, seconds: float, words: str) -> None:
    with running_gateway(scene) as running:
        with outage(running, fault) as suffered:
            time.sleep(seconds)
            uplink = running.status()["daemon"]["uplink"]
            assert not uplink["up"], f"{seconds} s without an answer, and sluice status calls it up"
            assert words in uplink["error"]
        judge(running, suffered.back_s)
        assert running.status()["daemon"]["uplink"]["up"]


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        pytest.param("address-changed", 0.5, marks=pytest.mark.long(seconds=10)),
        pytest.param("interface-changed", 0.5, marks=pytest.mark.long(seconds=10)),
        pytest.param("link-down", 6, marks=pytest.mark.long(seconds=15)),
        ("broker-moved", 5),
    ],
)
def test_after_an_outage_of_ipv6(scene: Scene, fault: str, seconds: float) -> None:
    """Many a cellular network has nothing else."""
    scene.ip_versions = (6,)
    scene.name_follows()
    with running_gateway(scene) as running:
        with outage(running, fault) as suffered:
            time.sleep(seconds)
        judge(running, suffered.back_s)


def test_ipv4_is_taken_when_ipv6_leads_nowhere(scene: Scene) -> None:
    """The box has addresses of both, the name too; IPv6 comes first (RFC 6724) until its packets vanish."""
    scene.ip_versions = (6, 4)
    scene.name_follows()
    with running_gateway(scene) as running:
        assert f"[{BROKERS_NET6}::" in scene.network.connections()
        gone_s = time.time()
        scene.network.blackhole_ipv6()
        time.sleep(RECOVERY_S_MAX)
        judge(running, gone_s)
        assert f"{BROKERS_NET}." in scene.network.connections()


def test_a_router_that_forgot_the_connection(scene: Scene) -> None:
    """The path is there all the time: only what belongs to older connections vanishes."""
    scene.network.masquerade()
    try:
        with running_gateway(scene) as running:
            with outage(running, "router-forgets") as suffered:
                pass
            judge(running, suffered.back_s)
    finally:
        scene.network.masquerade_no_more()


def test_a_third_of_all_packets_is_lost(scene: Scene) -> None:
    with running_gateway(scene) as running:
        with outage(running, "loss-30-percent") as suffered:
            time.sleep(12)
            # A connection may lose one segment six times in a row, and be given up: that is luck, and not for ever.
            deadline = time.monotonic() + 180
            # What was under way at its beginning does not count.
            while running.appended_since(suffered.begin_s + 2) < 100:
                assert time.monotonic() < deadline, "no progress with losses"
                time.sleep(1)
        judge(running, suffered.back_s)


@pytest.mark.long(seconds=40)
def test_a_link_slower_than_the_intake_makes_progress(scene: Scene) -> None:
    """A backlog of 300 kB, which 128 kbit/s carry in 19 s, and 70 kB more each second: with 10 s for a request.

    Requests have to be smaller than what waits, or none is ever answered.
    """
    with running_gateway(scene, 'compression = "none"\nrequest_timeout_s = 10', interval_ms=100) as running:
        FAULTS["blackhole"].begin(scene)
        time.sleep(3)
        with outage(running, "128-kbit") as suffered:
            time.sleep(25)
        outcome = judge(running, suffered.back_s)
    # The last ten seconds alone: what the size of requests is learnt from may take the time before.
    assert outcome.appended_between(suffered.back_s - 10, suffered.back_s) >= 100, "no progress on a slow link"
