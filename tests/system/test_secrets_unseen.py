"""No secret of a device is seen anywhere but where it is shown on purpose: in no log, answer, file or memory dump."""

import asyncio
import json
import re
import subprocess
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from gateway.daemon import control
from tests.support.gateways import SLUICE, daemon, write_config
from tests.support.mqtt_peers import connect
from tests.support.waiting import patience

HUSHED = "correct-horse-battery-staple"
"""A secret that somebody made up, and types into every field that there is."""


def sluice(config: Path, *words: str, may_fail: bool = False) -> str:
    """All that a command prints."""
    ended = subprocess.run(
        [SLUICE, *words, "--config", config],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
        input="",
    )
    assert may_fail or ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


async def log_in(port: int, user: str, secret: str, client_id: str = "kitchen") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(connect(client_id, login=(user, secret)))
    answer = await reader.read(4)
    writer.close()
    return answer


def measure(port: int, name: str, secret: str) -> None:
    """Publish a reading as a sensor does, with paho."""
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"paho-{name}")
    client.username_pw_set(name, secret)
    client.connect("127.0.0.1", port)
    client.loop_start()
    client.publish(f"device/{name}/thermo", '{"value": 1}', qos=1).wait_for_publish(10)
    client.disconnect()
    client.loop_stop()


async def test_secrets_are_nowhere_in_what_daemon_and_commands_say(tmp_path: Path, port: int) -> None:
    config = write_config(tmp_path, "127.0.0.1:1", port, "s", '[log]\nlevel = "debug"\n')
    config.write_text(config.read_text().replace("anonymous = true", ""))
    said: list[str] = []
    secrets: list[str] = [HUSHED]

    def shown(*words: str) -> str:
        told = json.loads(sluice(config, *words, "--json"))
        secret: str = told.pop("devices")[0]["secret"]
        secrets.append(secret)
        said.append(str(told))
        return secret

    first = shown("devices", "add", "m001")
    with daemon(config, port) as process:
        second = shown("devices", "add", "m002")
        operator = shown("devices", "add", "boss", "--operator")
        assert await log_in(port, "boss", operator) == b"\x20\x02\x00\x00"
        await asyncio.to_thread(measure, port, "m001", first)
        await asyncio.to_thread(measure, port, "m002", second)
        old, third = second, shown("devices", "rotate", "m002")
        kept = shown("devices", "rotate", "m001", "--keep-old", "1")
        for user, secret, client_id in (
            ("m002", old, "kitchen"),  # the old secret
            (third, "m002", third),  # the wrong way round, and the name as client identifier
            (third, third, third),
            ("m001", first + "x", "kitchen"),
            ("m001", HUSHED, HUSHED),
            (HUSHED, "m001", HUSHED),
            (f"m001:{kept}", "", f"sensor-{kept}"),  # too much copied from the URI
            (f"mqtt://m001:{kept}@barn", kept, ""),
        ):
            # An empty client identifier is generated.
            assert (await log_in(port, user, secret, client_id))[:2] == b"\x20\x02"
        said.append(sluice(config, "devices", "add", "m001", may_fail=True))
        said.append(sluice(config, "devices", "revoke", "m003", "--yes", may_fail=True))
        said.append(sluice(config, "check", may_fail=True))
        for words in (("status",), ("devices",), ("devices", "list"), ("buffer", "ls")):
            said += [sluice(config, *words, *how, may_fail=True) for how in ((), ("--json",))]
        control_socket = control.socket_path(tmp_path / "buffer.db")
        said += [str(control.call(control_socket, command)) for command in ("state", "devices", "devices-changed")]
        said.append(Path(f"/proc/{process.pid}/environ").read_text())
        said.append(Path(f"/proc/{process.pid}/cmdline").read_text())
        said.append(sluice(config, "devices", "revoke", "m002", "--yes"))
    log = config.with_suffix(".log").read_text()
    assert log.count("refused log-in ") >= 5
    assert "the wrong way round: the user name is" in log
    assert re.search(r"refused log-in +\[?.*user=m002", log)
    said.append(log)
    said += [path.read_bytes().decode(errors="replace") for path in tmp_path.iterdir() if path.is_file()]
    everything = "\n".join(said)
    assert "m001" in everything
    for secret in secrets:
        assert secret not in everything
        assert secret[:8] not in everything, "nor most of it"
