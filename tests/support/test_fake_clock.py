"""The faked clock: whatever a process asks the time of must see the same one, and be told when it is set."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import make_authority
from tests.support.deadline import deadline
from tests.support.fake_clock import YEAR_2000, FakeClock
from tests.support.waiting import patience

# What one process sees of its clocks, a line of JSON for each line that it reads. 5 is CLOCK_REALTIME_COARSE.
LOOKS = """
import datetime, json, os, sqlite3, ssl, sys, time
from gateway.clock.kernel_clock import boot_id, boottime_us, read_wall_clock
from gateway.settings import GatewaySettings
for line in sys.stdin:
    clock = read_wall_clock(GatewaySettings("gw1"))
    now_us = boottime_us()
    print(json.dumps({
        "time": time.time(),
        "coarse": time.clock_gettime(5),
        "datetime": datetime.datetime.now(datetime.UTC).timestamp(),
        "sqlite": (sqlite3.connect(":memory:").execute("SELECT julianday()").fetchone()[0] - 2440587.5) * 86400,
        "gateway": clock.at(now_us) / 1e6,
        "error_us": clock.error_us,
        "boottime_us": now_us,
        "boot_id": boot_id(),
    }), flush=True)
"""
TIMER = """
import ctypes, errno, os, select, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.timerfd_create(0, 0o2000000)
never = struct.pack("4q", 0, 0, 2**63 - 1, 0)
for _ in range(2):
    assert libc.timerfd_settime(fd, 1 | 2, never, None) == 0
    print("armed", flush=True)
    assert select.select([fd], [], [], 60)[0]
    try:
        os.read(fd, 8)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""
VERIFY = """
import ssl, sys
ca, certificate, key = sys.argv[1:]
client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
client.load_verify_locations(ca)
server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
server.load_cert_chain(certificate, key)
up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
sides = [
    client.wrap_bio(down, up, server_hostname="127.0.0.1"),
    server.wrap_bio(up, down, server_side=True),
]
while sides:
    for side in list(sides):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            sys.exit(error.verify_message)
        sides.remove(side)
"""


@pytest.fixture
def clock(tmp_path: Path) -> FakeClock:
    return FakeClock(tmp_path)


@contextmanager
def python(clock: FakeClock, program: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the box."""
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with deadline(60), subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=clock.environment()) as child:
        try:
            yield child
        finally:
            child.kill()


def look(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    seen: dict[str, Any] = json.loads(child.stdout.readline())
    return seen


def assert_sees(child: subprocess.Popen[str], clock: FakeClock) -> dict[str, Any]:
    """Check that a process's time lies between the clock's times before and after."""
    before_s, before_us = clock.wall(), clock.boottime_us()
    seen = look(child)
    after_s, after_us = clock.wall(), clock.boottime_us()
    for name in ("time", "coarse", "datetime", "sqlite"):
        # The coarse clock and SQLite's are late by a tick, or a millisecond.
        assert before_s - 0.02 <= seen[name] <= after_s + 0.001, name
    # Made of two clocks, between which others may have run.
    assert abs(seen["gateway"] - seen["time"]) <= after_s - before_s + 0.001
    assert before_us <= seen["boottime_us"] <= after_us
    assert seen["boot_id"] == clock.boot_id
    return seen


def test_a_process_sees_another_time_everywhere_also_as_it_is_set(clock: FakeClock) -> None:
    with python(clock, LOOKS) as child:
        seen = assert_sees(child, clock)
        assert datetime.fromtimestamp(seen["time"], UTC).year == 2000
        assert seen["error_us"] is None
        clock.step(-3600)
        assert assert_sees(child, clock)["time"] < YEAR_2000.timestamp()
        clock.sync(error_ms=25)
        assert abs(time.time() - clock.wall()) < 0.001
        assert 25_000 <= assert_sees(child, clock)["error_us"] <= 26_000
        clock.unsync()
        assert assert_sees(child, clock)["error_us"] is None


def test_another_boot_has_another_name_and_begins_to_count_anew(clock: FakeClock) -> None:
    with python(clock, LOOKS) as child:
        first = look(child)["boot_id"]
    clock.reboot(datetime(2010, 1, 1, tzinfo=UTC))
    with python(clock, LOOKS) as child:
        seen = assert_sees(child, clock)
    assert seen["boot_id"] != first
    assert datetime.fromtimestamp(seen["time"], UTC).year == 2010


def test_a_timer_that_waits_for_a_step_of_the_clock_is_woken_each_time(clock: FakeClock) -> None:
    with python(clock, TIMER) as child:
        assert child.stdout is not None
        for step in (clock.step, lambda _: clock.sync()):
            assert child.stdout.readline() == "armed\n"
            step(1000)
            assert child.stdout.readline() == "ECANCELED\n"


@pytest.mark.parametrize(("year", "told"), [(2000, "certificate is not yet valid"), (2100, "certificate has expired")])
def test_openssl_goes_by_it(clock: FakeClock, tmp_path: Path, year: int, told: str) -> None:
    authority = make_authority(tmp_path / "ca")
    server = authority.sign("server")
    command = [sys.executable, "-c", VERIFY, *map(str, (authority.certificate, server.certificate, server.key))]
    clock.set(datetime(year, 1, 1, tzinfo=UTC))
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=clock.environment(), timeout=patience(60)
    )
    assert told in ended.stderr
    clock.set(datetime.now(UTC) + timedelta(minutes=1))
    subprocess.run(command, check=True, env=clock.environment(), timeout=patience(60))
