"""From the path being back to the first new record in Kafka, for each fault; and a long random schedule of faults."""

import asyncio
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from statistics import median

from aiokafka import ConsumerRecord

from tests.bench.context import Bench, say
from tests.bench.report import Result
from tests.support import kafka_admin, uplink_site
from tests.support.certificates import Authority, Identity, make_authority
from tests.support.gateways import header
from tests.support.kafka_cluster import Cluster, Listener, kafka_cluster
from tests.support.netns import NetworkUnavailableError, new_network
from tests.support.uplink_scene import RECOVERY_S_MAX, Step, inflict, random_steps, running_gateway, scene_in

TIMES, TIMES_QUICK = 10, 2
RANDOM_FAULTS, RANDOM_FAULTS_QUICK = 60, 4
PATH_FAULTS_S = {
    # Longer than what TCP needs to give up, so that what is measured is the way back; the blackhole lasts into
    # the time when a connection that nobody gives up waits long for its next retransmission.
    "address-changed": 0.5,
    "interface-changed": 0.5,
    "link-down": 6.0,
    "blackhole": 20.0,
    "broker-moved": 5.0,
    "name-unknown": 5.0,
    "dns-dead": 8.0,
}
"""Faults of `uplink_scene.FAULTS`, and for how many seconds at least each lasts."""
SPREAD_S = 3.0
"""Most seconds by which an outage is made longer, at random. So it ends at any point of back-off and probes."""
PAUSE_S = 2.0
"""Between two times: readings flow again."""
REFUSED_S = 4.0
"""Seconds for which a gateway is refused before its file is corrected."""
CALM_S_MAX = 60.0
LEDGER_SHOWN = 10
WORDS_MAX = 2_000
"""Characters of an error that repeats a daemon's log."""
USER = "gateway-1"


@dataclass(frozen=True, slots=True)
class Suffered:
    """A fault that was met some times."""

    fault: str
    seconds: tuple[float, ...]
    """Seconds of each run, from the return of the path to new readings in Kafka; infinite if none came."""
    ledger: tuple[str, ...] = ()
    """Faults of the readings in Kafka, by `uplink_ledger`."""

    @property
    def counted_s(self) -> list[float]:
        """Seconds of each run. A run whose readings never came back counts as long as the test waited."""
        return [min(each, CALM_S_MAX) for each in self.seconds]

    def result(self) -> Result:
        worst = max(self.counted_s)
        name = f"recovery_s_{self.fault.replace('-', '_')}"
        return Result(name, median(self.counted_s), "s", None, f"worst {worst:.1f} s of {len(self.seconds)}")


async def recovery(bench: Bench) -> list[Result]:
    """Each fault of path, names, brokers and papers: how soon new readings are in Kafka once it has ended."""
    times = int(os.environ.get("BENCH_TIMES", bench.pick(TIMES, TIMES_QUICK)))
    directory = bench.directory / "recovery"
    suffered: list[Suffered] = []
    notes: list[Result] = []
    for kind, faults in {"path": _path_faults, "cluster": _cluster_faults, "papers": _paper_faults}.items():
        try:
            async for each in faults(directory / kind, times):
                seen = ", ".join(f"{seconds:.1f}" for seconds in each.seconds)
                say(f"recovery: {each.fault}: {seen} s; {len(each.ledger)} faults in the ledger")
                suffered.append(each)
        except NetworkUnavailableError as reason:
            notes.append(Result(f"recovery_s_{kind}", None, "s", None, f"not measured: {reason}"))
        except (AssertionError, TimeoutError) as error:
            # Nothing comes any more. The others of its kind cannot be met, with this fault still there.
            after = suffered[-1].fault if suffered else "the start"
            say(f"recovery: {kind}, after {after}: {str(error)[:WORDS_MAX]}")
            suffered.append(Suffered(f"{kind}-without-end", (float("inf"),)))
    for words in [words for each in suffered for words in each.ledger][:LEDGER_SHOWN]:
        say(f"recovery: {words}")
    worst = max(suffered, key=lambda each: max(each.counted_s))
    wrong = sum(len(each.ledger) for each in suffered)
    target = f"<= {RECOVERY_S_MAX:.0f}"
    return [
        Result("recovery_s_worst", max(worst.counted_s), "s", target, f"{worst.fault}; {times} times each"),
        *[each.result() for each in suffered],
        *notes,
        Result("recovery_ledger_faults", wrong, "readings", "= 0", "missing, out of order, or under two ids"),
    ]


async def random_faults(bench: Bench) -> list[Result]:
    """Run a long random schedule of faults of the path, one after the other, and compare the readings afterwards."""
    seed = int(os.environ.get("BENCH_SEED", secrets.randbits(32)))
    count = int(os.environ.get("BENCH_FAULTS", bench.pick(RANDOM_FAULTS, RANDOM_FAULTS_QUICK)))
    say(f"random: BENCH_SEED={seed}, {count} faults")
    directory = bench.directory / "random"
    directory.mkdir(parents=True)
    with new_network(directory) as network, scene_in(network, directory) as scene:
        # Before the first connection: the router cannot hide a gateway that others know already.
        scene.network.masquerade()
        with running_gateway(scene) as running:
            backs_s = [inflict(scene, step) for step in islice(random_steps(seed), count)]
            running.wait_until_calm(CALM_S_MAX)
            note = f"BENCH_SEED={seed}"
            try:
                outcome = running.finish(CALM_S_MAX)
            except AssertionError as error:
                say(f"random: {str(error)[:WORDS_MAX]}")
                return [Result("random_recovery_s", CALM_S_MAX, "s", f"<= {RECOVERY_S_MAX:.0f}", f"{note}: not at all")]
    say(f"random: {outcome.audit}")
    note += f": {outcome.audit.acknowledged:,} readings acknowledged"
    last_s = outcome.recovery_s(backs_s[-1])
    return [
        Result("random_faults", count, "faults", None, note),
        Result("random_ledger_faults", len(outcome.audit.faults), "readings", "= 0"),
        Result("random_repeated", outcome.audit.repeated, "records", None, "resent, with the same ce_id"),
        Result("random_recovery_s", last_s, "s", f"<= {RECOVERY_S_MAX:.0f}", "after the last of them"),
    ]


# -- the path -------------------------------------------------------------------------------------


async def _path_faults(directory: Path, times: int) -> AsyncIterator[Suffered]:
    directory.mkdir(parents=True)
    with new_network(directory) as network, scene_in(network, directory) as scene:
        for fault, least_s in PATH_FAULTS_S.items():
            backs_s = []
            with running_gateway(scene) as running:
                for _ in range(times):
                    time.sleep(PAUSE_S)  # noqa: ASYNC251 - nothing else runs in this loop
                    lasts_s = least_s + _spread_s()
                    backs_s.append(inflict(scene, Step(fault, lasts_s, 0.0)))
                    running.wait_until_calm(CALM_S_MAX)
                outcome = running.finish(CALM_S_MAX)
            scene.mend()
            yield Suffered(fault, tuple(outcome.recovery_s(back_s) for back_s in backs_s), outcome.audit.faults)


def _spread_s() -> float:
    return random.uniform(0, SPREAD_S)  # noqa: S311 - when a fault ends, no secret


# -- brokers --------------------------------------------------------------------------------------


async def _cluster_faults(directory: Path, times: int) -> AsyncIterator[Suffered]:
    """Faults of a cluster of three nodes. The cluster is back when every partition takes new readings."""
    with kafka_cluster(directory / "nodes", 3) as cluster:
        for fault, suffer in (("leader-moved", _leaders_moved), ("rolled", _rolled)):
            site = _site(directory, fault, cluster)
            await kafka_admin.create_topic(site.plain, site.topic(), 3, 3)
            backs_s: list[list[float]] = []
            async with _flowing(site):
                for _ in range(times):
                    await asyncio.sleep(PAUSE_S)
                    backs_s.append(await suffer(cluster, site))
            records = await uplink_site.records_of(site.plain, site.topic())
            found = await uplink_site.compare(site)
            seconds = tuple(max(recovered_s(records, back_s) for back_s in of_time) for of_time in backs_s)
            yield Suffered(fault, seconds, found.faults)
    with kafka_cluster(directory / "alone", 1) as cluster:
        site = _site(directory, "broker-replaced", cluster)
        replaced_s = []
        async with _flowing(site):
            for _ in range(times):
                await asyncio.sleep(PAUSE_S)
                cluster.kill()
                cluster.format()
                cluster.start()
                back_s = time.time()
                # Nobody but the daemon makes the topic here; in the next round all of this is gone again.
                replaced_s.append(await _first_after(site, back_s))
        # The former brokers' records are lost with them. So there is no ledger to compare.
        yield Suffered("broker-replaced", tuple(replaced_s))


async def _leaders_moved(_cluster: Cluster, site: uplink_site.Site) -> list[float]:
    """Each partition gets another leader; when."""
    backs_s = []
    for partition, leader in (await kafka_admin.leaders_of(site.plain, site.topic())).items():
        await kafka_admin.move_leader(site.plain, site.topic(), partition, leader % 3 + 1)
        backs_s.append(time.time())
    await asyncio.sleep(_spread_s())
    return backs_s


async def _rolled(cluster: Cluster, _site: uplink_site.Site) -> list[float]:
    """One node after the other ends and begins; when each did: two of three are enough all the time."""
    backs_s = []
    for node in cluster.nodes:
        node.stop()
        backs_s.append(time.time())
        await asyncio.sleep(_spread_s())
        node.start()
        backs_s.append(time.time())
        await asyncio.sleep(PAUSE_S)
    return backs_s


def _site(directory: Path, name: str, cluster: Cluster, kafka: str = "", listener: str = "DIRECT") -> uplink_site.Site:
    folder = directory / f"site-{name}"
    folder.mkdir(parents=True)
    return uplink_site.Site(folder, name, cluster.addresses(listener), cluster.bootstrap, kafka)


@asynccontextmanager
async def _flowing(site: uplink_site.Site) -> AsyncIterator[None]:
    """A gateway and its sensors, for the length of a block. At its end, all their readings are in Kafka."""
    with site.daemon():
        async with uplink_site.fleet(site):
            await uplink_site.records_until(site.plain, site.topic(), 1, CALM_S_MAX)
            yield
        await site.drained(CALM_S_MAX)


async def _first_after(site: uplink_site.Site, back_s: float) -> float:
    """Wait for the first reading that was taken in after a moment; give the seconds until Kafka had it."""
    async with asyncio.timeout(CALM_S_MAX):
        while True:
            new = [
                record.timestamp
                for record in await uplink_site.records_of(site.plain, site.topic())
                if received_s(record) >= back_s
            ]
            if new:
                return float(min(new) / 1000 - back_s)
            await asyncio.sleep(0.3)


def received_s(record: ConsumerRecord) -> float:
    """When a reading was taken in (Unix time)."""
    return datetime.fromisoformat(header(record, "ce_receivedtime")).timestamp()


def recovered_s(records: Iterable[ConsumerRecord], back_s: float) -> float:
    """From `back_s` until every partition had a reading that was taken in after it; infinite where one has none."""
    first: dict[int, float] = defaultdict(lambda: float("inf"))
    for record in records:
        first[record.partition] = min(
            first[record.partition], record.timestamp / 1000 if received_s(record) >= back_s else float("inf")
        )
    return max(first.values(), default=float("inf")) - back_s


# -- papers ---------------------------------------------------------------------------------------


async def _paper_faults(directory: Path, times: int) -> AsyncIterator[Suffered]:
    """Brokers that refuse this gateway, until a file of its is another one."""
    authorities = make_authority(directory / "ca"), make_authority(directory / "other")
    own = authorities[0].sign("broker").key_store
    listeners = [
        Listener("MUTUAL", "SSL", key_store=own, client_ca=authorities[0].certificate),
        Listener("LOGIN", "SASL_SSL", key_store=own, mechanisms=("SCRAM-SHA-256",)),
    ]
    with kafka_cluster(directory / "node", 1, listeners) as cluster:
        yield await _certificate_renewed(directory, cluster, authorities, times)
        yield await _password_changed(directory, cluster, _trust(authorities[0]), times)


async def _certificate_renewed(
    directory: Path,
    cluster: Cluster,
    authorities: tuple[Authority, ...],
    times: int,
) -> Suffered:
    """Another CA signs the gateways' certificates from now on; the broker has a new one, too."""
    folder = directory / "papers"
    identities = [authority.sign("gw1", "") for authority in authorities]
    _be(folder, identities[0])
    settings = f'{_trust(authorities[0])}certificate = "{folder}/gateway.pem"\nkey = "{folder}/gateway.key"\n'
    site = _site(directory, "certificate-renewed", cluster, settings, "MUTUAL")

    async def renew(number: int) -> None:
        key_store = authorities[0].sign(f"broker{number}").key_store
        cluster.configure(Listener("MUTUAL", "SSL", key_store=key_store, client_ca=authorities[number % 2].certificate))

    return await _refused_until(site, cluster, times, renew, lambda number: _be(folder, identities[number % 2]))


async def _password_changed(directory: Path, cluster: Cluster, ca: str, times: int) -> Suffered:
    """Changed at the broker, whose connections end, and in the gateway's file some seconds later."""
    password = directory / "papers" / "kafka.password"
    sasl = f'[kafka.sasl]\nmechanism = "SCRAM-SHA-256"\nuser = "{USER}"\npassword_file = "{password}"\n'
    site = _site(directory, "password-changed", cluster, ca + sasl, "LOGIN")
    _put(password, _password(0), 0o400)

    async def change(number: int) -> None:
        await kafka_admin.set_password(site.plain, USER, "SCRAM-SHA-256", _password(number))

    await change(0)
    return await _refused_until(site, cluster, times, change, lambda number: _put(password, _password(number), 0o400))


async def _refused_until(
    site: uplink_site.Site,
    cluster: Cluster,
    times: int,
    spoil: Callable[[int], Awaitable[None]],
    mend: Callable[[int], None],
) -> Suffered:
    """Have a gateway refused, then mend its file, some times; the site is named after the fault."""
    backs_s = []
    async with _flowing(site):
        for number in range(1, times + 1):
            await asyncio.sleep(PAUSE_S)
            await spoil(number)
            # Open connections stay. The new file counts from the next connection on.
            cluster.node(1).stop()
            cluster.node(1).start()
            await asyncio.sleep(REFUSED_S + _spread_s())
            mend(number)
            back_s = time.time()
            await _first_after(site, back_s)
            backs_s.append(back_s)
    records = await uplink_site.records_of(site.plain, site.topic())
    found = await uplink_site.compare(site)
    seconds = tuple(
        min(each.timestamp for each in records if received_s(each) >= back_s) / 1000 - back_s for back_s in backs_s
    )
    return Suffered(site.prefix, seconds, found.faults)


def _trust(authority: Authority) -> str:
    """`[kafka.tls]`."""
    return f'[kafka.tls]\nca = "{authority.certificate}"\n'


def _password(number: int) -> str:
    return f"password-{number}"


def _be(folder: Path, identity: Identity) -> None:
    """The gateway's certificate from now on: two files, which no daemon can see replaced at once."""
    _put(folder / "gateway.key", identity.key.read_text(), 0o400)
    _put(folder / "gateway.pem", identity.certificate.read_text(), 0o444)


def _put(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(f"{text}\n")
    beside.chmod(mode)
    beside.replace(path)
