"""Boxes on this machine: each has a gateway of its own, which looks at one folder of the network."""

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import box
from demo.box_service import BoxService
from demo.web_folder import WebFolder
from gateway.host import fleet_report
from gateway.host.fleet_report import FleetReport

CONFIG = """\
[gateway]
id = "gateway"
namespace = "{namespace}"
# As in the demo of one gateway: kernels of build machines never report that their clock is synced.
clock = "system"
system_clock_error_ms = 1.0
hold_new_clock_s = 2

[buffer]
path = "{folder}/buffer.db"

[mqtt_listener]
host = "127.0.0.1"
port = {port}
anonymous = true
new_connections_per_s_max = 1000

[[routes]]
topic = "device/{{device}}/{{stream}}"
kafka = "device-{{stream}}"
identity = "json"

[kafka]
bootstrap = ["{bootstrap}"]
create_topics = true
one_replica_is_enough = true
request_timeout_s = 8.0
backoff_s_max = 2.0

[fleet]
url = "{url}"
ca = "{ca}"
"""


@dataclass(frozen=True, slots=True)
class Box:
    """A box: a folder in place of its disk. Its gateway's name is that of the folder, with `/gateway` behind it."""

    folder: Path
    port: int
    """Port of its MQTT listener."""
    trial_s: float
    """Seconds in which a change has to be found good."""

    @property
    def name(self) -> str:
        """The gateway as `fleet.toml` names it."""
        return f"{self.folder.name}/gateway"

    @property
    def config(self) -> Path:
        return self.folder / box.CONFIG

    @property
    def first_settings(self) -> dict[str, Any]:
        """Settings with which it was set up."""
        return tomllib.loads(self._first.read_text())

    @property
    def _first(self) -> Path:
        return self.folder / "first.toml"

    @property
    def buffer(self) -> Path:
        return self.folder / "buffer.db"

    @property
    def log(self) -> Path:
        return self.folder / "gateway.log"

    @property
    def report(self) -> FleetReport:
        """What became of the fleet's file on it."""
        return fleet_report.read(self.folder / box.REPORT_FOLDER) or FleetReport()

    def command(self, *words: str | Path) -> tuple[str | Path, ...]:
        """The command by which `sluice` runs on the box."""
        return (sys.executable, "-m", "demo.box", self.folder, str(self.trial_s), *words)

    def service(self) -> BoxService:
        """Its daemon, to be started."""
        return BoxService(self.folder, self.command("run", "--config", self.config), self.log)

    def set_up(self, bootstrap: str, web: WebFolder, public_key: str) -> None:
        """Make its folder, with settings and with the key that it trusts."""
        self.folder.mkdir(parents=True)
        (self.folder / box.PUBLIC_KEY).write_text(public_key)
        text = CONFIG.format(
            namespace=self.folder.name,
            folder=self.folder,
            port=self.port,
            bootstrap=bootstrap,
            url=web.url,
            ca=web.certificate,
        )
        self.config.write_text(text)
        self._first.write_text(text)
