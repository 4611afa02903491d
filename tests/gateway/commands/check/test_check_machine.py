"""`sluice check` on this box: each mistake stands under its setting's name, and the check changes nothing."""

import asyncio
import errno
import grp
import json
import os
import pty
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.buffer import schema
from gateway.cli import main
from gateway.clock.floor import FLOOR_MARK, RELEASED_US, ClockFloor
from gateway.clock.gateway_clock import WallClock
from gateway.clock.kernel_clock import boottime_us
from gateway.commands.certificate_dates import known_floor
from gateway.commands.check import machine
from gateway.commands.check.finding import Finding, Remark
from gateway.config import running_settings
from gateway.config.config_file import load
from gateway.host import our_image
from gateway.reading import Mark
from gateway.settings import NO_SOURCE
from gateway.tls.certificates import read_certificates
from gateway.uplink.memory import BUDGET_MARK
from gateway.uplink.quota import UplinkBudget
from tests.support.buffers import append, opened
from tests.support.deadline import deadline
from tests.support.gateways import SLUICE, answering, free_port
from tests.support.mosquitto import self_signed
from tests.support.waiting import until

CONFIG = """\
[gateway]
id = "gw1"
clock = "system"
[buffer]
path = "{folder}/buffer.db"
bytes_max = 10_000_000
[kafka]
bootstrap = ["127.0.0.1:1"]
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody who may not")


def write_config(folder: Path, more: str = "", **changes: str) -> Path:
    text = CONFIG.format(folder=folder)
    for old, new in changes.items():
        text = text.replace(old, new)
    config = folder / "gateway.toml"
    config.write_text(text + more)
    return config


def findings(config: Path) -> dict[str, Finding]:
    """Findings by subject. If several have one subject, the last counts."""
    return {finding.subject: finding for finding in machine.check_machine(load(config), config)}


def judgement(finding: Finding) -> str:
    return "FAIL" if not finding.ok else "warn" if isinstance(finding, Remark) else "ok"


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own disk out of these tests."""
    monkeypatch.setattr(machine, "check_disk", lambda _buffer: [])


# -- the buffer -----------------------------------------------------------------------------------


def test_a_place_where_all_is_well_is_left_as_it_was(tmp_path: Path) -> None:
    config = write_config(tmp_path, '[[mqtt_brokers]]\nhost = "b.example"\ntopics = ["device/#"]\n')
    all_found = findings(config)
    assert {subject: judgement(each) for subject, each in all_found.items()} == {
        "settings": "ok",
        "buffer.path": "ok",
        "buffer.fair_from": "ok",
        "clock": "ok",
    }
    found = all_found["buffer.path"]
    assert f"{tmp_path}/buffer.db can be written by this user (" in found.words
    assert list(tmp_path.iterdir()) == [config]


def test_a_box_with_our_image_says_which_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_image, "read", lambda: our_image.OurImage("1.2.0", "b", {"data partition": 0.05}))
    found = findings(write_config(tmp_path))["image"]
    assert (found.link, judgement(found)) == ("disk", "ok")
    assert found.words == "version 1.2.0 runs from slot b; the data partition is 5% full"


def test_a_gateway_that_nothing_can_reach_is_remarked_on(tmp_path: Path) -> None:
    found = findings(write_config(tmp_path))["sources"]
    assert judgement(found) == "warn"
    assert found.words == NO_SOURCE
    assert found.words.startswith("nothing comes in: no section says where from; write [mqtt_listener]")
    for section in ('[serial]\nports = ["all"]\n', "[mqtt_listener]\nport = 0\nanonymous = true\n"):
        section_ = section.replace("port = 0", f"port = {free_port()}")
        assert "sources" not in findings(write_config(tmp_path, section_))


async def test_looking_at_a_buffer_that_is_there_changes_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    async with opened(tmp_path / "buffer.db"):
        pass
    # But for the index of the WAL, where SQLite notes who reads.
    files = [file for file in tmp_path.iterdir() if not file.name.endswith("-shm")]
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
    names = {file.name for file in tmp_path.iterdir()}
    assert judgement(findings(config)["buffer.path"]) == "ok"
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files} == before
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    ("change", "subject", "words"),
    [
        ("/none/buffer.db", "buffer.path", "none does not exist; make it, for the user that sluice runs as"),
        ("/file/buffer.db", "buffer.path", "file is no directory"),
        ("/folder", "buffer.path", "is a directory; name a file in it, such as "),
        ("/mail.db", "buffer.path", "is another program's database; write a path of the gateway's own"),
    ],
)
def test_a_path_that_cannot_hold_the_buffer(tmp_path: Path, change: str, subject: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with closing(sqlite3.connect(tmp_path / "mail.db")) as connection:
        connection.execute("CREATE TABLE mail (text)")
    found = findings(write_config(tmp_path, **{"/buffer.db": change}))[subject]
    assert judgement(found) == "FAIL"
    assert words in found.words


def test_a_buffer_of_a_newer_version(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with closing(schema.connect(tmp_path / "buffer.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.execute("PRAGMA journal_mode = DELETE")
    found = findings(config)["buffer.path"]
    assert (judgement(found), found.code) == ("warn", "buffer-newer")
    assert "sluice run sets it aside" in found.words


def test_for_how_long_a_device_is_kept_whatever_another_one_sends(tmp_path: Path) -> None:
    kept = findings(write_config(tmp_path, **{"10_000_000": "1_000_000_000"}))["buffer.fair_from"]
    assert judgement(kept) == "ok"
    assert "sends 100 bytes each second are kept for 8.0 days, whatever one other device sends" in kept.words
    small = findings(write_config(tmp_path))["buffer.fair_from"]
    assert "are kept for 0.0 days" in small.words
    alone = findings(write_config(tmp_path, bytes_max="fair_from = 1\nbytes_max"))["buffer.fair_from"]
    assert "one device may fill the buffer" in alone.words


def test_a_file_that_sluice_would_set_aside_is_remarked_on(tmp_path: Path) -> None:
    (tmp_path / "buffer.db").write_bytes(bytes(range(256)) * 40)
    found = findings(write_config(tmp_path))["buffer.path"]
    assert judgement(found) == "warn"
    assert "sluice run sets it aside" in found.words


def test_room_that_the_disk_does_not_have(tmp_path: Path) -> None:
    greedy = findings(write_config(tmp_path, **{"10_000_000": str(2**40)}))["buffer.bytes_max"]
    assert judgement(greedy) == "FAIL"
    assert greedy.words.startswith("1.1 TB, but the disk of ")
    assert "lower the setting, or make room" in greedy.words
    config = write_config(tmp_path, bytes_max=f"free_bytes_min = {2**40}\nbytes_max")
    tight = findings(config)["buffer.free_bytes_min"]
    assert judgement(tight) == "FAIL"
    assert "would be full from the start" in tight.words


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that others may enter: pytest's own are closed to them."""
    folder = Path("/var/tmp") / f"sluice-check-{os.getpid()}"  # noqa: S108
    folder.mkdir()
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


AS_NOBODY = """
import os, sys
from pathlib import Path
import msgspec
from gateway.commands.check.machine import check_machine
from gateway.config.config_file import load
config = Path(sys.argv[1])
settings = load(config)
# Once before, so that all is imported: Python itself may stand where nobody else may read.
list(check_machine(settings, config))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(msgspec.json.encode(list(check_machine(settings, config))).decode())
"""


def as_nobody(config: Path) -> dict[str, str]:
    command = [sys.executable, "-c", AS_NOBODY, str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return {finding["subject"]: finding["words"] for finding in json.loads(ended.stdout) if not finding["ok"]}


@as_root
def test_what_another_user_may_not_do_is_told_with_whose_it_is(public_folder: Path) -> None:
    config = write_config(public_folder)
    assert f"{public_folder} is root's, and this user (nobody) may not write it" in as_nobody(config)["buffer.path"]
    public_folder.chmod(0o777)
    # As a first `sluice run` by root leaves it.
    (public_folder / "buffer.db.lock").touch(0o644)
    assert "buffer.db.lock is root's, and this user (nobody)" in as_nobody(config)["buffer.path"]


def test_a_file_system_that_became_read_only_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    (tmp_path / "buffer.db").touch()
    assert "(chown)" in findings(config)["buffer.path"].words
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY, f_files=0))
    found = findings(config)["buffer.path"]
    assert judgement(found) == "FAIL"
    assert f"{tmp_path} is on a file system that is mounted read-only: the disk or card may be dying" in found.words
    assert "chown" not in found.words


@pytest.mark.parametrize("name", ["buffer.db", "buffer.db-wal", "buffer.db-shm", "buffer.db.lock"])
def test_a_named_pipe_in_the_buffers_place_is_told_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with deadline():
        found = findings(write_config(tmp_path))["buffer.path"]
    assert judgement(found) == "FAIL"
    assert f"{tmp_path / name} is no file; remove it, or write another path" in found.words


async def test_a_linked_buffer_is_looked_at_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "card").mkdir()
    (tmp_path / "buffer.db").symlink_to(tmp_path / "card" / "buffer.db")
    config = write_config(tmp_path)
    assert f"{tmp_path}/card/buffer.db can be written" in findings(config)["buffer.path"].words
    # As `sluice run` does it; through the link it looked for the WAL beside the link.
    async with opened(load(config).buffer.path):
        assert (tmp_path / "card" / "buffer.db-wal").exists()
    assert judgement(findings(config)["buffer.path"]) == "ok"


# -- ports ----------------------------------------------------------------------------------------


def listener(port: int, more: str = "") -> str:
    return f"[mqtt_listener]\nport = {port}\nanonymous = true\n{more}"


def test_a_free_port_and_who_may_reach_it(tmp_path: Path) -> None:
    port = free_port()
    found = findings(write_config(tmp_path, listener(port)))["mqtt_listener.port"]
    assert (judgement(found), found.words.partition(";")[0]) == ("ok", f"127.0.0.1:{port} is free")
    assert "only this box can connect there" in found.words
    everywhere = findings(write_config(tmp_path, listener(port, 'host = "0.0.0.0"\n')))["mqtt_listener.port"]
    assert everywhere.words == f"0.0.0.0:{port} is free"


def test_a_port_that_another_program_has_is_a_mistake_and_the_program_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = write_config(tmp_path, listener(server.getsockname()[1]))
        found = findings(config)["mqtt_listener.port"]
    assert judgement(found) == "FAIL"
    assert f"(process {os.getpid()}); stop that program, or write another port" in found.words


async def test_a_port_that_this_gateway_has_is_no_mistake(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = write_config(tmp_path, listener(server.getsockname()[1]))
        async with opened(tmp_path / "buffer.db"):
            found = findings(config)["mqtt_listener.port"]
    assert judgement(found) == "ok"
    assert f"served by the running sluice of this buffer (process {os.getpid()})" in found.words


async def test_a_user_who_is_not_told_whose_a_port_is_hears_what_is_likely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.commands.check.ports._processes_listening", lambda _address, _port: [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = write_config(tmp_path, listener(server.getsockname()[1]))
        anybodys = findings(config)["mqtt_listener.port"]
        async with opened(tmp_path / "buffer.db"):
            ours = findings(config)["mqtt_listener.port"]
    assert (judgement(anybodys), judgement(ours)) == ("FAIL", "ok")
    assert "sudo ss -ltnp names it" in anybodys.words
    assert "most likely by the running sluice of this buffer" in ours.words


def test_a_gateway_that_runs_with_another_buffer_is_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.commands.check.ports.name_of", lambda _: "sluice")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = findings(write_config(tmp_path, listener(port)))["mqtt_listener.port"]
    assert judgement(found) == "FAIL", "a gateway that is started with these settings ends at once"
    assert f"taken by a sluice that runs with another buffer.path (process {os.getpid()})" in found.words
    assert "sudo systemctl restart sluice" in found.words


async def test_settings_that_were_changed_since_the_gateway_was_started(tmp_path: Path) -> None:
    config = write_config(tmp_path, "")
    running = running_settings.of(load(config))

    async def state(_arguments: dict[str, Any]) -> object:
        return {"settings": running}

    async def told() -> list[str]:
        found = await asyncio.to_thread(lambda: list(machine.check_machine(load(config), config)))
        return [each.words for each in found if each.subject == "settings" and each.result == "warning"]

    async with opened(load(config).buffer.path), answering(load(config).buffer.path, {"state": state}):
        config.write_text(config.read_text() + "# a comment changes nothing\n")
        assert await told() == []
        config.write_text(config.read_text().replace('id = "', 'id = "new-'))
        (words,) = await told()
    assert words == (
        "The settings were changed since the gateway was started. It goes on with those of before, as "
        f"{running.namespace}/{running.gateway}. Run sudo systemctl restart sluice."
    )


EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is to be told of
GATEWAY_ELSEWHERE = """
import fcntl, socket, sys
with socket.create_server(("127.0.0.2", int(sys.argv[1]))), open(sys.argv[2], "wb") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("listens", flush=True)
    sys.stdin.read()
"""


def test_who_has_a_port_is_judged_by_the_address_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        command = [sys.executable, "-c", GATEWAY_ELSEWHERE, str(port), str(tmp_path / "buffer.db.lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ours:
            assert ours.stdout is not None
            assert ours.stdout.readline() == b"listens\n"

            def told(host: str) -> tuple[str, str]:
                config = write_config(tmp_path, listener(port, f'host = "{host}"\n'))
                found = findings(config)["mqtt_listener.port"]
                return judgement(found), found.words

            here, elsewhere, everywhere = told("127.0.0.1"), told("127.0.0.2"), told(EVERYWHERE)
            ours.communicate()
    assert elsewhere == (
        "ok",
        f"127.0.0.2:{port} is served by the running sluice of this buffer (process {ours.pid})",
    )
    for judged, words in (here, everywhere):
        assert judged == "FAIL"
        assert f"(process {os.getpid()}); stop that program" in words


@pytest.mark.parametrize(
    ("family", "theirs", "host"),
    [
        (socket.AF_INET, EVERYWHERE, "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", EVERYWHERE),
        (socket.AF_INET6, "::", "127.0.0.1"),
        (socket.AF_INET6, "::", "::1"),
        (socket.AF_INET6, "::1", "::"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_a_program_is_named_whose_address_takes_in_ours(
    tmp_path: Path, family: socket.AddressFamily, theirs: str, host: str
) -> None:
    with socket.socket(family) as server:
        try:
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind((theirs, 0))
        except OSError:
            pytest.skip("takes a machine with IPv6")
        server.listen()
        port = server.getsockname()[1]
        found = findings(write_config(tmp_path, listener(port, f'host = "{host}"\n')))["mqtt_listener.port"]
    assert judgement(found) == "FAIL"
    shown = f"[{host}]" if ":" in host else host
    assert found.words.startswith(f"{shown}:{port} is taken by ")
    assert f"(process {os.getpid()})" in found.words


class KernelWithoutIpv6(socket.socket):
    """Sockets of a kernel that was built or started without IPv6."""

    def __init__(self, family: int = -1, kind: int = -1, protocol: int = -1, fileno: int | None = None) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        super().__init__(family, kind, protocol, fileno)


def test_a_kernel_without_ipv6_listens_on_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", port, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port)),
    ]
    config = write_config(tmp_path, listener(port, 'host = "localhost"\n'))
    monkeypatch.setattr(socket, "socket", KernelWithoutIpv6)
    # As Debian's /etc/hosts has it.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_address, **_hints: both)
    assert judgement(findings(config)["mqtt_listener.port"]) == "ok"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_address, **_hints: both[:1])
    found = findings(config)["mqtt_listener.host"]
    assert judgement(found) == "FAIL"
    assert "this box has no address localhost now" in found.words


def test_an_address_of_some_other_box(tmp_path: Path) -> None:
    found = findings(write_config(tmp_path, listener(free_port(), 'host = "192.0.2.1"\n')))["mqtt_listener.host"]
    assert judgement(found) == "FAIL"
    assert "this box has no address 192.0.2.1 now" in found.words


# -- the clock ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (600, "Once Kafka is reached, readings wait for it, for 10 min at most"),
        (0, "Once Kafka is reached, readings go with times that may be wrong"),
    ],
)
def test_a_clock_that_is_not_synced_is_told_with_what_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: int, words: str
) -> None:
    config = write_config(tmp_path, **{'clock = "system"': f"hold_unsynced_s = {hold}"})
    set_clock(monkeypatch, datetime(2026, 12, 14, tzinfo=UTC), synced=False)
    found = findings(config)["clock"]
    assert judgement(found) == "warn"
    assert words in found.words
    assert 'write clock = "system" under [gateway]' in found.words
    set_clock(monkeypatch, datetime(2026, 12, 14, tzinfo=UTC))
    assert judgement(findings(config)["clock"]) == "ok"


# -- certificates and passwords -------------------------------------------------------------------


def with_tls(folder: Path, certificate: Path, key: Path, more: str = "") -> Path:
    tls = f'[mqtt_listener.tls]\nport = {free_port()}\ncertificate = "{certificate}"\nkey = "{key}"\n{more}'
    return write_config(folder, listener(0) + tls)


def set_clock(monkeypatch: pytest.MonkeyPatch, now: datetime, *, synced: bool = True) -> None:
    clock = WallClock(int(now.timestamp() * 1e6) - boottime_us(), 1_000 if synced else None)
    monkeypatch.setattr(machine, "read_wall_clock", lambda _: clock)


def test_a_certificate_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    key.chmod(0o400)
    (dates,) = read_certificates(certificate)
    config = with_tls(tmp_path, certificate, key, f'client_ca = "{certificate}"\n')
    subjects = ("mqtt_listener.tls.certificate", "mqtt_listener.tls.client_ca")

    def told(now: datetime, *, synced: bool = True) -> tuple[str, str]:
        set_clock(monkeypatch, now, synced=synced)
        found = findings(config)
        assert judgement(found["mqtt_listener.tls.key"]) == "ok"
        judgements = {judgement(found[subject]) for subject in subjects}
        assert len(judgements) == 1
        return judgements.pop(), found[subjects[0]].words

    end = f"{dates.end:%Y-%m-%d}"
    judged, words = told(dates.begin + timedelta(hours=1))
    assert (judged, words) == (
        "warn",
        f"{certificate} expires on {end}, in 1 day; have it renewed before that",
    )
    judged, words = told(dates.end)
    assert judged == "FAIL"
    assert f"has expired on {end}, and this box's clock says {end}" in words
    assert told(dates.begin - timedelta(hours=1))[0] == "FAIL"
    # A Raspberry Pi before it has heard of NTP.
    judged, words = told(datetime(1970, 1, 1, tzinfo=UTC), synced=False)
    assert judged == "warn"
    assert "by this box's clock, which says 1970-01-01 and is not synced" in words


def test_a_certificate_that_ended_before_the_floor_has_ended_whatever_an_unsynced_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    (dates,) = read_certificates(certificate)
    config = with_tls(tmp_path, certificate, key, f'client_ca = "{certificate}"\n')
    set_clock(monkeypatch, dates.begin - timedelta(days=9000), synced=False)
    floor = ClockFloor()
    monkeypatch.setattr(machine, "known_floor", lambda _: floor)

    def told() -> tuple[str, str]:
        found = findings(config)
        assert "Only certificates that ended before" in found["certificates"].words
        return judgement(found["mqtt_listener.tls.certificate"]), found["mqtt_listener.tls.client_ca"].words

    def known(moment: datetime) -> None:
        floor.recall({FLOOR_MARK: b"%d" % (moment.timestamp() * 1e6)})

    known(dates.end - timedelta(hours=1))
    assert told()[0] == "warn"
    known(dates.end)
    judged, words = told()
    assert judged == "FAIL"
    assert f"has expired on {dates.end:%Y-%m-%d}: {dates.end:%Y-%m-%d} has passed, whatever this box's clock" in words


async def test_the_latest_time_that_is_known_is_read_beside_a_running_gateway_alone(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db"
    async with opened(path) as buffer:
        buffer.keep([Mark(FLOOR_MARK, b"%d" % (RELEASED_US + 5))], soon=True)
        await until(lambda: known_floor(path).us == RELEASED_US + 5)
    before = sorted(tmp_path.iterdir())
    assert known_floor(path).us == RELEASED_US
    assert sorted(tmp_path.iterdir()) == before


def test_the_check_names_the_hosts_of_the_certificate(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "barn-1.example")
    config = with_tls(tmp_path, certificate, key)
    found = findings(config)["mqtt_listener.tls"]
    assert judgement(found) == "ok"
    assert found.words.startswith("clients may connect to barn-1.example: ")
    text, _ = one_day_only(tmp_path)
    certificate.write_text(text)
    found = findings(config)["mqtt_listener.tls"]
    assert judgement(found) == "warn"
    assert "names no host (subjectAltName), so clients" in found.words
    certificate.write_text("nothing")
    assert "mqtt_listener.tls" not in findings(config)


def one_day_only(folder: Path) -> tuple[str, datetime]:
    """A certificate of one day, and its end; those of `self_signed` have two."""
    file = folder / "old.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", "/dev/null", "-out", str(file), "-days", "1", "-subj", "/CN=old"]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    (dates,) = read_certificates(file)
    return file.read_text(), dates.end


def test_the_first_certificate_of_a_chain_and_one_authority_must_be_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    valid = certificate.read_text()
    old, end = one_day_only(tmp_path)
    config = with_tls(tmp_path, certificate, key, f'client_ca = "{certificate}"\n')
    set_clock(monkeypatch, end)

    def told(chain: str) -> tuple[tuple[str, str], tuple[str, str]]:
        certificate.write_text(chain)
        found = findings(config)
        ours, authorities = found["mqtt_listener.tls.certificate"], found["mqtt_listener.tls.client_ca"]
        return (judgement(ours), ours.words), (judgement(authorities), authorities.words)

    (judged, words), (judged_authorities, words_authorities) = told(valid + old)
    assert (judged, judged_authorities) == ("warn", "warn")
    assert f"certificate 2 of 2 in {certificate} has expired on {end:%Y-%m-%d}, and this box's clock says" in words
    assert f"of 2 certificates in {certificate}, only 1 can be used now" in words_authorities
    (judged, words), (judged_authorities, _) = told(old + valid)
    assert (judged, judged_authorities) == ("FAIL", "warn")
    assert f"{certificate} has expired on" in words
    assert [judged for judged, _ in told(old)] == ["FAIL", "FAIL"]


def test_a_key_that_everybody_may_read_is_remarked_on(public_folder: Path) -> None:
    certificate, key = self_signed(public_folder)
    key.chmod(0o644)
    config = with_tls(public_folder, certificate, key)
    found = findings(config)["mqtt_listener.tls.key"]
    assert judgement(found) == "warn"
    assert f"chmod o-r {key}" in found.words
    public_folder.chmod(0o700)
    assert judgement(findings(config)["mqtt_listener.tls.key"]) == "ok"


def test_a_key_of_another_certificate_and_files_that_are_missing(tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    _, other = self_signed(tmp_path, "other")
    mixed = findings(with_tls(tmp_path, certificate, other))["mqtt_listener.tls.key"]
    assert judgement(mixed) == "FAIL"
    assert "is not the key of the first certificate" in mixed.words
    missing = findings(with_tls(tmp_path, tmp_path / "none.pem", other))
    assert "none.pem does not exist" in missing["mqtt_listener.tls.certificate"].words
    assert "mqtt_listener.tls.key" not in missing


def broker(more: str) -> str:
    return f'[[mqtt_brokers]]\nhost = "broker.example"\ntopics = ["device/#"]\nuser = "gw"\n{more}'


@pytest.mark.parametrize(
    ("content", "mode", "judged", "words"),
    [
        ("correct horse\n", 0o400, "ok", "holds a password, and only its owner may read it"),
        ("correct horse\n", 0o440, "FAIL", "can be read by others; run: chmod 0400"),
        ("correct horse \n", 0o400, "warn", "ends in a space, which counts as part of it; take the space out, unless"),
        ("\tcorrect horse\n", 0o400, "warn", "begins with a space"),
        ("", 0o400, "FAIL", "is empty"),
        (None, 0, "FAIL", "password: No such file or directory; write the password there, chmod 0400"),
    ],
)
def test_a_password_file(tmp_path: Path, content: str | None, mode: int, judged: str, words: str) -> None:
    secret = tmp_path / "password"
    if content is not None:
        secret.write_text(content)
        secret.chmod(mode)
    found = findings(write_config(tmp_path, broker(f'password_file = "{secret}"\n')))["mqtt_brokers[0].password_file"]
    assert judgement(found) == judged
    assert words in found.words
    assert "horse" not in found.words


def test_a_password_in_settings_that_everybody_may_read_is_remarked_on(public_folder: Path) -> None:
    config = write_config(public_folder, broker('password = "correct horse"\n'))
    config.chmod(0o644)
    found = findings(config)["mqtt_brokers[0].password"]
    assert judgement(found) == "warn"
    assert "horse" not in found.words
    config.chmod(0o640)
    assert "mqtt_brokers[0].password" not in findings(config)


def test_named_pipes_are_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o400)
    config = write_config(tmp_path, broker(f'password_file = "{pipe}"\n[mqtt_brokers.tls]\nca = "{pipe}"\n'))
    with deadline():
        found = findings(config)
    for name in ("password_file", "tls.ca"):
        assert judgement(found[f"mqtt_brokers[0].{name}"]) == "FAIL"
        assert f"{pipe} is no file" in found[f"mqtt_brokers[0].{name}"].words


def test_the_files_of_a_brokers_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = f'[mqtt_brokers.tls]\nca = "{key}"\ncertificate = "{certificate}"\nkey = "{key}"\n'
    found = findings(write_config(tmp_path, broker(tls)))
    assert "holds a private key and no certificate" in found["mqtt_brokers[0].tls.ca"].words
    assert found["mqtt_brokers[0].tls.certificate"].ok
    assert found["mqtt_brokers[0].tls.key"].ok


# -- Kafka's certificates and password ------------------------------------------------------------


def test_the_files_of_kafkas_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = f'[kafka.tls]\nca = "{key}"\ncertificate = "{certificate}"\nkey = "{key}"\n'
    found = findings(write_config(tmp_path, tls))
    assert "holds a private key and no certificate" in found["kafka.tls.ca"].words
    assert found["kafka.tls.certificate"].words.startswith(f"{certificate} expires on ")
    assert found["kafka.tls.key"].ok
    _, other = self_signed(tmp_path, "other")
    found = findings(write_config(tmp_path, tls.replace(f'key = "{key}"', f'key = "{other}"')))
    assert "is not the key of the first certificate" in found["kafka.tls.key"].words


def test_the_authority_of_a_server_that_gives_access_tokens(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    log_in = (
        f'[kafka.tls]\n[kafka.sasl]\nmechanism = "OAUTHBEARER"\nuser = "gw1"\npassword_file = "{key}"\n'
        'token_url = "https://login.example/token"\n'
    )
    found = findings(write_config(tmp_path, f'{log_in}token_ca = "{key}"\n'))
    assert "holds a private key and no certificate" in found["kafka.sasl.token_ca"].words
    found = findings(write_config(tmp_path, f'{log_in}token_ca = "{certificate}"\n'))
    assert found["kafka.sasl.token_ca"].words.startswith(f"{certificate} expires on ")


def test_the_authority_of_a_fleets_folder(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    section = '[fleet]\nurl = "https://updates.example/fleet"\n'
    found = findings(write_config(tmp_path, f'{section}ca = "{key}"\n'))
    assert "holds a private key and no certificate" in found["fleet.ca"].words
    found = findings(write_config(tmp_path, f'{section}ca = "{certificate}"\n'))
    assert found["fleet.ca"].words.startswith(f"{certificate} expires on ")


def test_kafkas_password_and_what_goes_in_the_clear(tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    secret = tmp_path / "password"
    secret.write_text("correct horse\n")
    secret.chmod(0o440)
    sasl = f'[kafka.sasl]\nmechanism = "SCRAM-SHA-512"\nuser = "gw1"\npassword_file = "{secret}"\n'
    found = findings(write_config(tmp_path, sasl))
    assert judgement(found["kafka.sasl.password_file"]) == "FAIL"
    assert "can be read by others; run: chmod 0400" in found["kafka.sasl.password_file"].words
    assert judgement(found["kafka.sasl"]) == "warn"
    assert "everybody on the way to Kafka can read and change the readings" in found["kafka.sasl"].words
    secret.chmod(0o400)
    found = findings(write_config(tmp_path, f'{sasl}[kafka.tls]\nca = "{certificate}"\n'))
    assert judgement(found["kafka.sasl.password_file"]) == "ok"
    assert "kafka.sasl" not in found
    assert "horse" not in str(found)


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("bytes_per_day_max = 10_000_000", "kafka.bytes_per_day_max allows 10.0 MB"),
        ("bytes_per_s_max = 1_000\nheartbeat_interval_s = 1.5", "kafka.bytes_per_s_max allows 86.4 MB"),
        ("bytes_per_day_max = 10_000_000\nbytes_per_s_max = 20_000", "kafka.bytes_per_day_max allows 10.0 MB"),
    ],
)
def test_heartbeats_that_leave_nothing_of_a_metered_link(tmp_path: Path, bound: str, words: str) -> None:
    found = findings(write_config(tmp_path, f"{bound}\n"))["kafka.heartbeat_interval_s"]
    assert judgement(found) == "warn"
    assert words in found.words
    # The proposed settings work.
    seconds = found.words.partition("; write ")[2].split()[0]
    mended = bound.replace("\nheartbeat_interval_s = 1.5", "") + f"\nheartbeat_interval_s = {seconds}\n"
    assert "kafka.heartbeat_interval_s" not in findings(write_config(tmp_path, mended))


def test_heartbeats_are_nothing_to_a_link_that_is_wide(tmp_path: Path) -> None:
    for bound in ("", "bytes_per_day_max = 50_000_000\n", "bytes_per_s_max = 20_000\n"):
        assert "kafka.heartbeat_interval_s" not in findings(write_config(tmp_path, bound))


async def test_a_quota_that_is_used_up_is_told_until_the_day_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noon = datetime(2026, 3, 14, 12, tzinfo=UTC)
    spent = UplinkBudget(0, 50_000_000, None)
    spent.spend(50_000_000, boottime_us() / 1e6, noon.timestamp())
    config = write_config(tmp_path, "bytes_per_day_max = 50_000_000\n")
    set_clock(monkeypatch, noon)
    async with opened(tmp_path / "buffer.db") as buffer:
        assert "kafka.bytes_per_day_max" not in findings(config)
        assert await append(buffer, [], [Mark(BUDGET_MARK, spent.state())])
        found = findings(config)["kafka.bytes_per_day_max"]
        assert judgement(found) == "warn"
        assert found.words.startswith("Nothing is sent until 00:00 UTC: the quota of the day is used up (kafka.bytes")
        set_clock(monkeypatch, noon + timedelta(hours=13))
        assert "kafka.bytes_per_day_max" not in findings(config)
        set_clock(monkeypatch, noon, synced=False)
        assert "until this day of the network's ends" in findings(config)["kafka.bytes_per_day_max"].words
        # A quota that was raised.
        set_clock(monkeypatch, noon)
        assert "kafka.bytes_per_day_max" not in findings(write_config(tmp_path, "bytes_per_day_max = 60_000_000\n"))


# -- serial ports ---------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[str]:
    """A terminal that stands for a serial port."""
    ours, theirs = pty.openpty()
    yield os.ttyname(theirs)
    os.close(ours)
    os.close(theirs)


def serial(*ports: str) -> str:
    return f"[serial]\nports = {list(ports)}\n"


def test_a_serial_port_that_is_there_and_one_that_is_not(tmp_path: Path, port: str) -> None:
    found = findings(write_config(tmp_path, serial(port)))["serial.ports"]
    assert judgement(found) == "ok"
    assert f"{port} may be opened by this user" in found.words
    missing = findings(write_config(tmp_path, serial(f"{tmp_path}/ttyUSB0")))["serial.ports"]
    assert judgement(missing) == "FAIL"
    assert missing.words.startswith(f"{tmp_path}/ttyUSB0 is not there; plug it in, or write another port; ")
    # Sensors may be plugged in later, and a pattern is made for that.
    later = findings(write_config(tmp_path, serial(f"{tmp_path}/ttyUSB*")))["serial.ports"]
    assert judgement(later) == "warn"
    assert judgement(findings(write_config(tmp_path, serial()))["serial.ports"]) == "warn"


def test_a_sensor_whose_readings_no_route_takes(tmp_path: Path, port: str) -> None:
    text = f'[[serial.text]]\nport = "{port}"\ndevice = "scale"\nformat = "key:value"\n'
    assert "serial.text[0]" not in findings(write_config(tmp_path, text))
    route = '[[routes]]\ntopic = "device/{device}/thermo"\nkafka = "device-thermo"\n'
    found = findings(write_config(tmp_path, text + route))["serial.text[0]"]
    assert judgement(found) == "FAIL"
    assert "its readings get the topic device/scale/text, which no route takes" in found.words


def test_a_file_is_no_serial_port(tmp_path: Path) -> None:
    found = findings(write_config(tmp_path, serial(f"{tmp_path}/gateway*")))["serial.ports"]
    assert judgement(found) == "FAIL"
    assert "gateway.toml" in found.words
    assert "is no serial port" in found.words


@as_root
def test_a_port_of_a_group_is_told_with_the_group(public_folder: Path) -> None:
    public_folder.chmod(0o777)
    port = public_folder / "ttyUSB0"
    try:
        os.mknod(port, stat.S_IFCHR | 0o660, os.makedev(188, 99))
        group = grp.getgrnam("dialout")
    except (PermissionError, KeyError):
        pytest.skip("takes a machine where root may make a device, with Debian's groups")
    os.chown(port, 0, group.gr_gid)
    port.chmod(0o660)
    words = as_nobody(write_config(public_folder, serial(str(port))))["serial.ports"]
    assert "may not be opened by this user (nobody)" in words
    assert "sudo usermod -aG dialout nobody, then log in again" in words
    port.chmod(0o600)
    assert "only its owner may" in as_nobody(write_config(public_folder, serial(str(port))))["serial.ports"]


# -- the command ----------------------------------------------------------------------------------


def test_warnings_do_not_fail_and_each_line_begins_with_its_judgement(tmp_path: Path, port: str) -> None:
    config = write_config(tmp_path, serial(port, f"{tmp_path}/ttyUSB*"))
    shown = CliRunner(env={"COLUMNS": "1000"}).invoke(main, ["check", "--config", str(config)])
    assert shown.exit_code == 1
    lines = shown.output.splitlines()
    judged = [line for line in lines if line.startswith("  ")]
    assert {line[2:6] for line in judged} == {"ok  ", "warn", "FAIL", "-   "}
    assert [line for line in lines if line not in judged] == [*_HEADINGS, "1 finding fails (FAIL), 2 warnings"]
    (failed,) = [line for line in judged if line.startswith("  FAIL")]
    assert failed.startswith("  FAIL  connection to 127.0.0.1:1: cannot be made: nothing listens at 127.0.0.1:1; is")
    assert "AddressFamily" not in shown.output
    told = json.loads(CliRunner().invoke(main, ["check", "--config", str(config), "--json"]).output)
    assert [(each["link"], each["result"], each["ok"], each.get("warning", False)) for each in told] == [
        ("configuration", "pass", True, False),
        ("disk", "pass", True, False),
        ("disk", "pass", True, False),
        ("clock", "pass", True, False),
        ("serial", "pass", True, False),
        ("serial", "warning", True, True),
        ("dns", "pass", True, False),
        ("tcp", "fail", False, False),
        ("tls", "pass", True, False),
        ("kafka", "skipped", True, False),
        ("topics", "skipped", True, False),
        ("topics", "pass", True, False),
        ("end-to-end", "warning", True, True),
    ]
    assert all(each["subject"] and each["words"] for each in told)


_HEADINGS = [
    "settings",
    "disk",
    "clock",
    "serial lines",
    "Kafka: names",
    "Kafka: connection",
    "Kafka: TLS",
    "Kafka: cluster",
    "Kafka: topics",
    "end to end",
]


def test_lines_fit_the_terminal_and_stay_whole_in_a_pipe(tmp_path: Path) -> None:
    config = write_config(tmp_path, serial(f"{tmp_path}/ttyUSB0"))
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(main, ["check", "--config", str(config)]).output
    assert all(len(line) <= 60 or " " not in line.strip() for line in narrow.splitlines())
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [str(SLUICE), "check", "--config", str(config)]
    piped = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)
    assert piped.stderr == ""
    lines = [line for line in piped.stdout.splitlines() if line.startswith("  ")]
    assert [line[2:6] for line in lines if "FAIL" in line] == ["FAIL", "FAIL"]
    assert all(line[2:6] in {"ok  ", "warn", "FAIL", "-   "} for line in lines)
