"""What leaves the quarantine: to be sent, or for good, and then it is counted."""

import time
from collections import Counter, defaultdict
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.buffer import Buffer
from gateway.buffer.file import BufferFile
from gateway.buffer.losses import LOSS_TYPE, loss_body
from gateway.buffer.quarantine import Quarantine
from gateway.buffer.rows import Loss, Quarantined, Series
from gateway.buffer.schema import connect
from gateway.buffer.status import read_status
from gateway.settings import BufferSettings
from tests.support.buffers import entry, input_of, losses, opened, quarantined_of, rows, store


async def test_what_is_dropped_from_the_quarantine_is_counted_in_that_transaction(path: Path) -> None:
    async with opened(path) as buffer:
        told = Loss("43", "refused-qos0", "boot-0", 5, 1, 2)
        own = Series("gateway-events", "gw1", "", "loss", LOSS_TYPE, "application/json")
        event = Series("gateway-events", "gw1", "", "boot", "sluice.gateway.boot", "application/json")
        for series, payload in ((own, msgspec.json.encode(loss_body(told))), (event, b"{}")):
            await store(buffer, [replace(entry(payload), series=series)])
        report, started = (row.series for row in await rows(buffer))
        for input_ in (
            input_of("no-route", b"raw", "", "kitchen", 7),
            *(
                input_of("no-route", b"raw", "42", "shed", 8, event_us=3 + n, device_boot="b", device_sequence=n)
                for n in range(2)
            ),
            input_of("topic-unknown", msgspec.json.encode(loss_body(told)), "", "loss", 9, series=report),
            input_of("topic-unknown", b"{}", "", "boot", 9, series=started),
            input_of("topic-unknown", b"no loss record", "", "loss", 10, series=report),
        ):
            await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        assert await buffer.transact(lambda file: file.lose_quarantined([1, 2, 3, 4, 5, 6, 99])) == 6
        assert await buffer.transact(lambda file: file.lose_quarantined([1, 2])) == 0
        assert await quarantined_of(buffer, range(1, 7)) == {}
    assert read_status(path).losses == {
        "quarantine-dropped": 3,
        "gateway-events-dropped": 2,
        "refused-qos0": 5,
    }, "on the disk, before anything is reported"
    async with opened(path) as buffer:
        found = {(loss.device, loss.reason): loss for loss in await losses(buffer)}
    of_device = found["42", "quarantine-dropped"]
    assert (of_device.count, of_device.first_us, of_device.last_us) == (2, 3, 4)
    assert (of_device.device_boot, of_device.first_sequence, of_device.last_sequence) == ("b", 0, 1)
    assert found["", "quarantine-dropped"].count == 1
    assert found["43", "refused-qos0"] == told


async def test_what_is_taken_out_of_the_quarantine_to_be_sent_is_not_lost(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db") as buffer:
        input_ = input_of("no-route", b"raw", "", "kitchen")
        await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        await buffer.transact(lambda file: file.requeue({1: entry(b"raw")}, {}))
        assert await losses(buffer) == []


async def test_what_makes_room_there_is_counted_with_its_sequence(tmp_path: Path) -> None:
    async with opened(tmp_path / "buffer.db", quarantine_rows_max=1) as buffer:
        for sequence in range(3):
            input_ = input_of(
                "topic-unknown", b"raw", "42", "shed", 7, event_us=5, device_boot="b", device_sequence=sequence
            )
            await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])
        (loss,) = await losses(buffer)
        assert loss == Loss("42", "quarantine-overflow", buffer.boot_id, 2, 5, 5, "b", 0, 1)


async def test_a_device_that_fills_it_pushes_out_its_own_alone(path: Path) -> None:
    """By many or by large ones, whoever came first; after a restart, and after some of it was taken out, too."""
    bounds: dict[str, Any] = {"quarantine_rows_max": 20, "quarantine_bytes_max": 100_000}

    async def set_aside(buffer: Buffer, device: str, payload: bytes) -> None:
        input_ = input_of("no-route", payload, device, "shed")
        await buffer.quarantine(buffer.id, [replace(entry(b"report"), quarantined=input_)], [])

    async def kept(buffer: Buffer) -> list[str]:
        found = (await quarantined_of(buffer, range(1, 200))).values()
        return [input_.datum.payload[:8].decode() for input_ in found]

    async with opened(path, bytes_max=10_000_000, **bounds) as buffer:
        await set_aside(buffer, "bad", b"bad 0")
        for number in range(5):
            await set_aside(buffer, "good", b"good %d" % number)
        for number in range(1, 50):
            await set_aside(buffer, "bad", b"bad %d" % number)
        good, bad = [f"good {number}" for number in range(5)], [f"bad {number}" for number in range(35, 50)]
        assert await kept(buffer) == good + bad
        for number in range(50, 60):
            await set_aside(buffer, "bad", (b"bad %d  " % number).ljust(20_000, b"x"))
        assert await kept(buffer) == [*good, *(f"bad {number}  " for number in range(56, 60))]
        await buffer.transact(lambda file: file.requeue(dict.fromkeys([3, 6], entry(b"again")), {}))
        del good[1], good[3]
    async with opened(path, bytes_max=10_000_000, **bounds) as buffer:
        for number in range(60, 90):
            await set_aside(buffer, "bad", b"bad %d" % number)
        assert await kept(buffer) == [*good, *(f"bad {number}" for number in range(73, 90))]
        assert buffer.counts["quarantine-overflow"] == 17
        (loss,) = await losses(buffer)
        assert loss.device == "bad"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abcde"), st.sampled_from((0, 100, 1_000, 9_000))),
            st.integers(1, 60),
            st.just("counted anew"),
        ),
        max_size=60,
    )
)
def test_whoever_holds_most_makes_room(steps: list[tuple[str, int] | int | str]) -> None:
    """By rows or by bytes, whatever came and was taken out before, and after all was counted anew."""
    lost: list[Quarantined] = []
    held: dict[str, dict[int, int]] = defaultdict(dict)
    rows_max, bytes_max, number = 10, 20_000, 0
    with TemporaryDirectory() as folder, closing(connect(Path(folder, "buffer.db"))) as connection:
        connection.execute("BEGIN")
        settings = BufferSettings(quarantine_rows_max=rows_max, bytes_max=10 * bytes_max)
        quarantine = Quarantine(settings, connection, "boot", Counter(), lost.append)
        for step in steps:
            if isinstance(step, str):
                quarantine.measure()
            elif isinstance(step, int):
                quarantine.drop([step])
                for of_device in held.values():
                    of_device.pop(step, None)
            else:
                device, size = step
                number += 1
                held[device][number] = size
                lost.clear()
                quarantine.keep(input_of("no-route", bytes(size), device, ""))
                for input_ in lost:
                    rows = {name: len(sizes) for name, sizes in held.items()}
                    sizes = {name: sum(sizes.values()) for name, sizes in held.items()}
                    measure = rows if sum(rows.values()) > rows_max else sizes
                    assert sum(rows.values()) > rows_max or sum(sizes.values()) > bytes_max
                    assert measure[input_.device] == max(measure.values())
                    del held[input_.device][min(held[input_.device])]
            assert quarantine.rows == sum(map(len, held.values())) <= rows_max
            assert quarantine.bytes == sum(sum(sizes.values()) for sizes in held.values()) <= bytes_max


async def test_a_full_quarantine_costs_the_same_whether_few_devices_fill_it_or_many(tmp_path: Path) -> None:
    def keep(file: BufferFile, names: list[str]) -> float:
        began_s = time.thread_time()
        for name in names:
            file.quarantine.keep(input_of("no-route", b"raw", name, "shed"))
        return time.thread_time() - began_s

    async def cost_s(devices: int) -> float:
        """Seconds for 100 further inputs, each of another device."""
        path = tmp_path / f"{devices}.db"
        async with opened(path, bytes_max=100_000_000, quarantine_rows_max=2 * devices) as buffer:
            names = [f"known-{number}" for number in range(devices)]
            await buffer.transact(lambda file: keep(file, names + names))
            parts = [[f"new-{part}-{number}" for number in range(100)] for part in range(5)]
            return min([await buffer.transact(partial(keep, names=part)) for part in parts])

    assert await cost_s(5_000) < 4 * await cost_s(50)


async def test_a_long_topic_counts_for_the_quarantines_bound(path: Path) -> None:
    async with opened(path, bytes_max=10_000_000) as buffer:
        for number in range(40):
            topic = f"{number}".ljust(60_000, "x")
            input_ = input_of("no-route", b"raw", "", topic, topic=topic)
            assert await store(buffer, [replace(entry(b"report"), quarantined=input_)])
        assert buffer.state.bytes_used < 1_300_000
        assert buffer.counts["quarantine-overflow"] == 32
    async with opened(path, bytes_max=10_000_000) as buffer:
        input_ = input_of("no-route", b"raw", "", "x" * 60_000, topic="x" * 60_000)
        assert await store(buffer, [replace(entry(b"report"), quarantined=input_)])
        assert buffer.counts["quarantine-overflow"] == 1
