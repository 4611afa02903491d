"""Measures the share of a line at 38400 baud that real firmware and a real gateway use, without noise and with it."""

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime

from aiokafka import ConsumerRecord

from tests.bench.context import Bench, say
from tests.bench.parts_serial_site import FRAME_BYTES_BESIDE_PAYLOAD, LINE_BYTES_PER_S, serial_site, tell_faults
from tests.bench.report import Result
from tests.bench.serial_boards import boards, built, finish, known_by
from tests.support.board_audit import Account, Known
from tests.support.gateways import consume

BYTE_ERRORS = {"0": 0.0, "1e4": 1e-4, "1e3": 1e-3, "1e2": 1e-2}
"""Shares of bytes with a flipped bit, each way, by the name of their result."""
FLAT_OUT_INTERVAL_MS = 10
"""The shortest that the firmware takes: more samples than the line has room for."""
SAMPLE_INTERVAL_MS = 100
WARM_UP_S = 5.0
"""The port is found, the sensor introduces itself, the window fills."""
DEVICE = "d000"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Results of one run."""

    share: float
    """First-accepted DATA frames' bytes, of all that the line can carry one way."""
    payload_share: float
    readings_per_s: float
    account: Account


async def goodput(bench: Bench) -> list[Result]:
    """The line's share that new readings get, at four rates of byte errors; then 10 Hz at one byte in a hundred."""
    await built("serial")
    seconds = bench.pick(20, 4)
    seen = {name: await _flat_out(bench, name, errors, seconds) for name, errors in BYTE_ERRORS.items()}
    results = [
        Result(
            f"goodput_share_ber_{name}",
            each.share,
            "of the line",
            ">= 0.6" if name == "0" else None,
            f"{each.readings_per_s:.1f} readings/s for {seconds} s, byte errors {BYTE_ERRORS[name]:g} each way",
        )
        for name, each in seen.items()
    ]
    accounts = [each.account for each in seen.values()]
    return [
        *results,
        Result("payload_share_ber_0", seen["0"].payload_share, "of the line", None, "the readings' own bytes"),
        Result("goodput_wrong", sum(len(each.wrong + each.made_up) for each in accounts), "readings", "= 0"),
        Result("goodput_missing", sum(len(each.missing) for each in accounts), "readings", "= 0"),
        Result("goodput_twice", sum(len(each.twice) for each in accounts), "readings", "= 0"),
        *await _at_10_hz(bench),
    ]


async def _flat_out(bench: Bench, name: str, errors: float, seconds: float) -> _Seen:
    async with serial_site(bench, f"goodput-{name}") as site:
        with boards(site.ports, (DEVICE,), FLAT_OUT_INTERVAL_MS, errors) as started:
            await asyncio.sleep(WARM_UP_S)
            began = time.time()
            await asyncio.sleep(seconds)
            ended = time.time()
            await finish(started)
        known = known_by(started[0])
        account = await site.settle(known)
        accepted = first_accepted(await consume(site.bootstrap, site.topic), began, ended)
    line_bytes = LINE_BYTES_PER_S * (ended - began)
    payload_bytes = sum(accepted)
    frame_bytes = payload_bytes + FRAME_BYTES_BESIDE_PAYLOAD * len(accepted)
    seen = _Seen(frame_bytes / line_bytes, payload_bytes / line_bytes, len(accepted) / (ended - began), account)
    _tell(
        f"goodput, errors {errors:g}: {seen.share:.3f} of the line, {seen.readings_per_s:.1f} readings/s",
        known,
        seen.account,
    )
    return seen


async def _at_10_hz(bench: Bench) -> list[Result]:
    """At one damaged byte in a hundred still every sample has to come through, soon enough for the ring."""
    errors, seconds = BYTE_ERRORS["1e2"], bench.pick(60, 6)
    async with serial_site(bench, "samples-10hz") as site:
        with boards(site.ports, (DEVICE,), SAMPLE_INTERVAL_MS, errors) as started:
            await asyncio.sleep(WARM_UP_S + seconds)
            await finish(started)
        known = known_by(started[0])
        account = await site.settle(known)
    _tell(f"10 Hz, errors {errors:g}", known, account)
    taken = len(known.centi_celsius)
    unacknowledged = taken - len(known.acknowledged)
    missing = unacknowledged + len(account.missing)
    wrong = len(account.wrong + account.made_up + account.twice)
    return [
        Result("samples_10hz_missing_1e2", missing, "samples", "= 0", f"of {taken} taken, acknowledged and in Kafka"),
        Result("samples_10hz_dropped_1e2", len(known.dropped), "samples", "= 0", "by the ring of 64"),
        Result("samples_10hz_wrong_1e2", wrong, "samples", "= 0", "another value, made up, or there twice"),
    ]


def first_accepted(records: list[ConsumerRecord], began: float, ended: float) -> list[int]:
    """Payload bytes of each reading that was taken in between two UNIX times; a record's repetition does not count."""
    accepted = {}
    for record in records:
        headers = {name: value.decode() for name, value in record.headers}
        if began <= datetime.fromisoformat(headers["ce_receivedtime"]).timestamp() < ended:
            accepted[headers["ce_id"]] = len(record.value)
    return list(accepted.values())


def _tell(what: str, known: Known, account: Account) -> None:
    dropped = f"{len(known.centi_celsius)} taken, {len(known.dropped)} dropped by the ring, sent or not"
    say(f"{what}; {dropped}; {account.acknowledged} acknowledged, {account.arrived} in Kafka")
    tell_faults(account)
