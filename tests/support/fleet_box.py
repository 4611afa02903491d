"""A box as far as `sluice fleet pull` goes: real files, a real folder by https, and a model of the service.

`PowerCuts` ends everything at a step that a test chooses, and loses what was not synced.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.commands.fleet import box_now, fleet_command, look, package_change, trial_steps
from gateway.commands.update import download
from gateway.commands.update.trial import FED_S, Seen
from gateway.commands.update.update_command import trusted_keys
from gateway.host import fleet_report, service
from gateway.host.fleet_report import FleetReport
from gateway.host.last_update import Before
from systemd import deb_signing
from tests.support.https_site import HttpsSite

GATEWAY = "north/barn-1"
WELL = Seen(active=True, fed_s=FED_S, readings=1, kafka=True)
PATH = "/fleet"


class FleetFolder:
    """The folder in the network, and the key of its owner."""

    def __init__(self, site: HttpsSite, authority: Path, place: Path) -> None:
        self.site = site
        self.authority = authority
        self.keys = place / "release-keys"
        self._place = place
        self._private = place / "signing/release.key"
        deb_signing.make_key(self._private)
        self.keys.mkdir()
        (self.keys / "release.pem").write_text(deb_signing.public_key(self._private))

    @property
    def url(self) -> str:
        return self.site.address(PATH)

    @property
    def section(self) -> str:
        """What has a gateway look here."""
        return f'[fleet]\nurl = "{self.url}"\nca = "{self.authority}"\n'

    def anew(self) -> None:
        vars(self.site).update(vars(HttpsSite(self.site.port)))

    def put(self, name: str, content: bytes, key: Path | None = None) -> None:
        """Put a file and its signature there."""
        self.site.files[f"{PATH}/{name}"] = content
        self.site.files[f"{PATH}/{name}.sig"] = self.signature(content, key)

    def signature(self, content: bytes, key: Path | None = None) -> bytes:
        file = self._place / "signed"
        file.write_bytes(content)
        return deb_signing.sign(file, key or self._private).read_bytes()

    def publish(self, text: str, serial: int = 1, more: str = "") -> None:
        """Publish a fleet's file with one group of all gateways."""
        group = f'[[groups]]\nname = "all"\ngateways = ["*/*"]\n{more}\n{text}'
        self.put("fleet.toml", f"serial = {serial}\n{group}\n".encode())


@dataclass
class FleetBox:
    """A box. The model of its service runs the settings that it was started with."""

    folder: FleetFolder
    place: Path
    before: Callable[[], Before] = lambda: Before(service=True, readings=True, kafka=True)
    """How it is before a change."""
    running: str = ""
    """Settings with which the service runs."""
    judged: Callable[[str], Seen] = lambda _settings: WELL
    """How it is with such settings."""
    now_s: float = 0.0
    restarts: int = 0
    started_s: float = -1.0
    """When the service was started last."""

    @property
    def config(self) -> Path:
        return self.place / "etc/gateway.toml"

    @property
    def text(self) -> str:
        return self.config.read_text()

    @property
    def report(self) -> FleetReport:
        found = fleet_report.read()
        assert found is not None
        return found

    def pull(self) -> Result:
        shown = CliRunner().invoke(main, ["fleet", "pull"])
        if shown.exception is not None and not isinstance(shown.exception, SystemExit):
            raise shown.exception
        return shown

    def power_on(self) -> None:
        self.running = self.text
        self.started_s = self.now_s

    def restart(self) -> None:
        self.restarts += 1
        self.power_on()


def boxed(folder: FleetFolder, place: Path, patched: pytest.MonkeyPatch) -> FleetBox:
    """A box that was set up, and looked at nothing yet."""
    box = FleetBox(folder, place)
    box.config.parent.mkdir(mode=0o750)
    box.config.write_text(
        f"""\
[gateway]
id = "barn-1"   # the barn's
namespace = "north"
clock = "system"

[kafka]
bootstrap = ["kafka.example:9092"]
linger_ms = 50

[buffer]
path = "{place}/buffer.db"

[mqtt_listener]

{folder.section}"""
    )
    box.config.chmod(0o640)
    box.running = box.text
    patched.setattr(os, "geteuid", lambda: 0)
    patched.setattr(download, "PAUSES_S", (0.0,))
    patched.setattr(fleet_command, "DEFAULT_CONFIG", box.config)
    patched.setattr(fleet_report, "FOLDER", place / "state")
    for module in (look, package_change):
        patched.setattr(module, "KEY_FOLDERS", (folder.keys,))
        patched.setattr(module, "trusted_keys", partial(trusted_keys, owner=os.getuid()))
    patched.setattr(box_now, "asked", lambda look, _kind: look())
    patched.setattr(box_now, "how_it_is", lambda: box.before())  # noqa: PLW0108 - tests replace it
    patched.setattr(box_now, "seen_now", lambda: box.judged(box.running))
    patched.setattr(service, "restart", box.restart)
    patched.setattr(service, "started_s", lambda: box.started_s)

    def sleep(seconds: float) -> None:
        box.now_s += seconds

    for module in (box_now, package_change, trial_steps):
        patched.setattr(module, "time", SimpleNamespace(monotonic=lambda: box.now_s, sleep=sleep))
    return box


class PowerCutError(BaseException):
    """The power is gone."""


class PowerCuts:
    """Cuts the power before a step: a sync, a renaming, a removal, or a step of the box's model.

    From then on nothing happens any more. What was not synced is lost: contents of files, and, if the card loses
    `names` too, renamings and removals in folders.
    """

    def __init__(self, place: Path, at: int, *, names: bool) -> None:
        self._place = place
        self._at = at
        self._names = names
        self.steps = 0
        self.is_off = False
        self._synced: set[int] = set()
        self._pending: list[tuple[Path, bytes | None]] = []
        """Names that were changed and not synced, and what was there before."""

    def step(self) -> None:
        self.steps += 1
        if self.is_off or self.steps == self._at:
            if not self.is_off:
                self.is_off = True
                self._lose()
            raise PowerCutError

    def _lose(self) -> None:
        if self._names:
            for path, before in reversed(self._pending):
                if before is None:
                    path.unlink(missing_ok=True)
                else:
                    path.write_bytes(before)
                    self._synced.add(path.stat().st_ino)
        for path in self._files():
            if path.stat().st_ino not in self._synced:
                path.write_bytes(b"")

    def _files(self) -> list[Path]:
        return [path for path in self._place.rglob("*") if path.is_file()]

    @contextmanager
    def on(self, patched: pytest.MonkeyPatch) -> Iterator[None]:
        """Watch the steps; the power is on again afterwards."""
        self._synced = {path.stat().st_ino for path in self._files()}
        fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

        def synced(descriptor: int) -> None:
            self.step()
            fsync(descriptor)
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                folder = Path(f"/proc/self/fd/{descriptor}").readlink()
                self._pending = [each for each in self._pending if each[0].parent != folder]
            else:
                self._synced.add(found.st_ino)

        def replaced(path: Path, target: Path) -> Path:
            self.step()
            self._pending.append((Path(target), Path(target).read_bytes() if Path(target).exists() else None))
            return replace(path, target)

        def unlinked(path: Path, *arguments: Any, **options: Any) -> None:
            self.step()
            if path.exists():
                self._pending.append((path, path.read_bytes()))
            unlink(path, *arguments, **options)

        with patched.context() as cut:
            cut.setattr(os, "fsync", synced)
            cut.setattr(Path, "replace", replaced)
            cut.setattr(Path, "unlink", unlinked)
            yield
