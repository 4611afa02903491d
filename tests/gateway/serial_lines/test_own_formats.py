"""A format of one's own runs in a process of its own: it gives readings, and whatever it does costs its port alone."""

import asyncio
import os
import re
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.formats.child import PRINTED_MAX
from gateway.formats.cutter import Cut, FormatError
from gateway.serial_lines.format_process import FormatProcess, running
from gateway.settings import SerialFormatSettings
from tests.gateway.serial_lines.test_ingress_serial import Bench, RecordingIntake, plugged, port_state, scale
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a format's file must be root's"),
]

FIELDS = """
import os
from gateway.formats.piece import Piece

class Format:
    bytes_max = 100

    def cut(self, received):
        end = received.find(b";")
        if end < 0:
            return None
        print("cutting", received)
        word = received[:end]
        if word == b"pid":
            return Piece(end + 1, (str(os.getpid()).encode(),))
        if word == b"bad":
            return Piece(end + 1, damage="bad-word")
        if word == b"talk":
            print("again " * 10_000)
        if word == b"raise":
            raise ValueError("no such word")
        if word == b"hang":
            while True:
                pass
        return Piece(end + 1, (word,))
"""
RAISES = (
    "from gateway.formats.piece import Piece\nclass Format:\n    bytes_max = 9\n    def cut(self, received):\n        "
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that has the format `fields`."""
    write(tmp_path, "fields", FIELDS)
    return tmp_path


@pytest.fixture
def idle(tmp_path: Path) -> Bench:
    return Bench(tmp_path, RecordingIntake())


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(text))
    file.chmod(0o644)
    return file


@asynccontextmanager
async def fields(folder: Path) -> AsyncIterator[FormatProcess]:
    async with running("fields", folder, answer_s=2) as process:
        yield process


async def failure(name: str, folder: Path, data: bytes = b"abc") -> str:
    """The words of a format that fails."""
    with pytest.raises(FormatError) as failed:
        async with running(name, folder, answer_s=2) as process:
            await process.feed(data)
    return str(failed.value)


async def test_a_format_in_a_file_cuts_bytes_in_its_process_and_may_print(folder: Path) -> None:
    async with fields(folder) as process:
        assert await process.feed(b"a") == []
        assert await process.feed(b"b;\xff\0;bad;c") == [
            Cut((b"ab",)),
            Cut((b"\xff\0",)),
            Cut(damage="bad-word", piece=b"bad;"),
        ]
        ((pid,),) = [cut.readings for cut in await process.feed(b"\n;pid;") if cut.readings != (b"c\n",)]
        assert int(pid) != os.getpid()
        assert Path(f"/proc/{int(pid)}").exists()
    assert not Path(f"/proc/{int(pid)}").exists()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no such frame')", r"raised ValueError: no such frame \(.*/mine.py, line 5\)"),
        ("import json; json.loads('x')", r"raised JSONDecodeError: Expecting value: .* \(.*/mine.py, line 5\)$"),
        ("while True: pass", "took too long for one answer, so it was ended"),
        ("import time; time.sleep(1000)", "took too long for one answer, so it was ended"),
        ("import re; re.match(r'(a|a)*b', 'a' * 99)", "took too long for one answer, so it was ended"),
        ("return Piece(1, (bytes(10**9),))", r"raised MemoryError: it may take 128 MB \(.*, line 5\)"),
        ("return Piece(1, (bytes(10**6),))", "gave 18,000,0.. bytes for one answer; 1,000,000 is the most"),
        ("import os; os._exit(3)", r"ended its own process \(status 3\)"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("import os; os.kill(os.getpid(), 11)", r"was ended by a signal \(SIGSEGV\)"),
        ("import os; os.closerange(0, 99); return None", "ended its own process|took too long"),
        ("import os; [os.write(fd, b'x\\n') for fd in range(3, 5)]", "wrote something else|raised OSError"),
        ("return Piece(0)", "cut off 0 of 3 bytes"),
        ("return 7", "returned 7; return a Piece, or None"),
    ],
)  # fmt: skip
async def test_whatever_a_format_does_ends_its_process_and_is_told_in_words(
    tmp_path: Path, body: str, words: str
) -> None:
    write(tmp_path, "mine", RAISES + body)
    told = await failure("mine", tmp_path)
    assert re.match(words, told), told


async def test_what_a_format_prints_is_bounded(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with fields(folder) as process:
        await process.feed(b"talk;talk;")
        assert await process.feed(b"ab;") == [Cut((b"ab",))]
    printed = capfd.readouterr().err
    assert printed.startswith("cutting b'talk;talk;'\nagain again")
    assert PRINTED_MAX < len(printed) < PRINTED_MAX + 100
    assert printed.endswith("prints more than is shown)\n")


async def test_a_format_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    told = await failure("mine", tmp_path)
    assert told == (
        f"is not there: write {tmp_path}/mine.py, install a package with an entry point mine in sluice.formats, or "
        "name another format"
    )
    file = write(tmp_path, "mine", "import numbers\nclass Formt: pass\n")
    assert await failure("mine", tmp_path) == f"is {file}, which has no class Format"
    write(tmp_path, "mine", "class Format:\n    bytes_max = 9\n")
    assert await failure("mine", tmp_path) == "has no function cut(self, received)"
    write(tmp_path, "mine", "class Format:\n    cut = print\n")
    assert (await failure("mine", tmp_path)).startswith("has bytes_max = None; write a whole number")
    write(tmp_path, "mine", "class Format:\n  bytes_max = \n")
    assert (await failure("mine", tmp_path)).startswith("raised SyntaxError: invalid syntax (mine.py, line 2)")


async def test_only_a_file_that_nobody_but_root_can_change_is_run(folder: Path) -> None:
    file = folder / "fields.py"
    file.chmod(0o664)
    mend = f"; run: chown root: {file} && chmod 644 {file}"
    assert await failure("fields", folder) == f"is {file}, and others can write it{mend}"
    file.chmod(0o644)
    os.chown(file, 65_534, 65_534)
    assert await failure("fields", folder) == f"is {file}, and it, or a folder above it, is another user's{mend}"
    os.chown(file, 0, 0)
    folder.chmod(0o777)
    assert await failure("fields", folder) == f"is {file}, and others can write in a folder above it{mend}"


async def test_a_format_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "my_package", FIELDS.replace("class Format", "class Fields"))
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sluice.formats]\nwords = my_package:Fields\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with running("words", tmp_path / "formats") as process:
        assert await process.feed(b"ab;") == [Cut((b"ab",))]


# -- on a port ------------------------------------------------------------------------------------


def own(port: Path, folder: Path) -> SerialFormatSettings:
    return SerialFormatSettings(port=str(port), device="yard", format="fields", folder=folder)


async def test_a_port_is_read_through_a_format_of_ones_own(idle: Bench, folder: Path) -> None:
    async with plugged(idle, "ttyUSB0") as (sensor,), idle.serving(formats=(own(sensor.port, folder),)) as ingress:
        await sensor.opened()
        await sensor.write(b"one;bad;two;")
        (first, second), done = await idle.intake.next()
        assert [first.datum.payload, second.datum.payload] == [b"one", b"two"]
        assert first.topic == "device/yard/fields"
        done(True)
        await until(lambda: idle.intake.quarantined == [("yard", str(sensor.port), b"bad;", "bad-word")])
        assert port_state(ingress, sensor)["trouble"] is None


async def test_a_format_that_fails_rests_and_begins_again_and_costs_its_port_alone(idle: Bench, folder: Path) -> None:
    async with plugged(idle, "ttyUSB0", "ttyUSB1") as (sensor, weight):
        settings = {"formats": (own(sensor.port, folder),), "text": (scale(weight.port),)}
        with capture_logs() as logs:
            async with idle.serving(**settings) as ingress:  # type: ignore[arg-type]
                await sensor.opened()
                await weight.opened()
                # Slow lines bring a piece in parts.
                await sensor.write(b"one;rai")
                await idle.intake.next()
                await sensor.write(b"se;")
                await until(lambda: port_state(ingress, sensor)["trouble"] is not None)
                trouble = port_state(ingress, sensor)["trouble"]
                assert trouble.startswith("THE FORMAT FAILED: fields raised ValueError: no such word (")
                assert trouble.endswith("It is started again after 1 s")
                assert idle.intake.quarantined == [("yard", str(sensor.port), b"raise;", "format-failed")]
                await sensor.write(b"missed;")
                await until(lambda: ("yard", "format-failed", 0) in idle.intake.losses)
                await sensor.write(b"two;")
                (reading,), _ = await idle.intake.next()
                assert reading.datum.payload == b"two"
                assert port_state(ingress, sensor)["trouble"] is None
                await sensor.write(b"hang;")
                await asyncio.sleep(0)
                # The event loop and other ports do not wait for it.
                await weight.write(b"\ngrams=1\n")
                (reading,), _ = await idle.intake.next()
                assert reading.datum.payload == b'{"grams":1}'
        (failed,) = [line for line in logs if line["event"].startswith("a format of one's own failed")]
        assert (failed["device"], failed["format"], failed["again_s"]) == ("yard", "fields", 1.0)
    told = [(kind, details.get("cause")) for kind, device, details in idle.intake.events if device == "yard"]
    assert [kind for kind, _ in told] == ["device-appeared", "device-died", "device-appeared"]
    assert str(told[1][1]).startswith("raised ValueError: no such word")
