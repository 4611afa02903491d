"""A box with our image: an emulated arm64 machine that starts from the card by U-Boot.

One processor, for with two an emulated machine stood still once. How long a test waits is counted in the machine's own
CPU time: a busy host makes it slower by the clock, and not by that.
"""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from image import card
from tests.support.uboot_board import U_BOOT, boot_file

CPU_S_MAX = 400.0
"""CPU seconds of the emulator within which a start has to come to what is waited for."""
MQTT_PORT, PAGE_PORT, SSH_PORT = 1883, 8080, 22
HOST = "10.0.2.2"
"""Address by which a guest reaches this host."""
MONITOR = ".monitor"
_TICKS = os.sysconf("SC_CLK_TCK")


def put(image: Path, name: str, content: bytes) -> None:
    """Put a file onto the boot partition of a card that has no power."""
    place = f"{image}@@{card.FIRST_SECTOR * card.SECTOR}"
    subprocess.run(["mcopy", "-o", "-i", place, "-", f"::{name}"], input=content, check=True)


class Guest:
    """One start of the machine."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, ports: dict[int, int]) -> None:
        self._process = process
        self._log = log
        self._ports = ports
        """Ports of this host, by the guest's."""
        self._passed = 0
        """Characters of the console up to the end of those that were waited for last."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the emulator has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def said(self) -> str:
        """All that this start wrote to the serial console."""
        return self._log.read_text(errors="replace")

    def wait(self, condition: Callable[[], object], words: str, cpu_s: float = CPU_S_MAX) -> None:
        """Wait until a condition is true. Raises AssertionError with the console's last words."""
        until_s = self.cpu_s + cpu_s
        while not condition():
            assert self._process.poll() is None, f"the machine is off; {words}:\n{self.said()[-3_000:]}"
            assert self.cpu_s < until_s, f"waited in vain for {cpu_s:.0f} s of CPU: {words}:\n{self.said()[-3_000:]}"
            time.sleep(0.2)

    def wait_for(
        self, pattern: str, cpu_s: float = CPU_S_MAX, *, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Wait for words on the console, behind those that were waited for before. `meanwhile` is done at each look."""

        def came() -> bool:
            meanwhile()
            found = re.compile(pattern).search(self.said(), self._passed)
            self._passed = self._passed if found is None else found.end()
            return found is not None

        self.wait(came, pattern, cpu_s)

    def plug_in(self) -> None:
        """Put the stick into the box. It stays there when the box restarts."""
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(str(self._log.with_suffix(MONITOR)))
            with channel.makefile("rw") as lines:
                # QEMU's machine protocol begins with a greeting.
                lines.readline()
                stick = {"driver": "usb-storage", "id": "plugged", "drive": "stick", "removable": True}
                for command, arguments in (("qmp_capabilities", {}), ("device_add", stick)):
                    lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
                    lines.flush()
                    while "return" not in (answer := json.loads(lines.readline())):
                        assert "error" not in answer, answer

    def publish(self, user: str, secret: str, number: int) -> bool:
        """Send one reading as a sensor does, on a connection of its own; whether it was acknowledged."""
        client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=f"sensor-{user}", protocol=mqtt.MQTTv311)
        client.username_pw_set(user, secret)
        acknowledged = []
        client.on_publish = lambda *_: acknowledged.append(True)
        payload = f'{{"boot": "1-0000000a", "seq": {number}, "celsius": 21.5}}'

        # Not by the name of outside: in a circle of references, paho would not close its sockets.
        def send(connected: mqtt.Client, *_: object) -> None:
            connected.publish(f"device/{user}/thermo", payload, qos=1)

        client.on_connect = send
        try:
            client.connect("127.0.0.1", self._ports[MQTT_PORT], keepalive=60)
            until_s = time.monotonic() + 10
            while not acknowledged and time.monotonic() < until_s and client.loop(0.2) == mqtt.MQTT_ERR_SUCCESS:
                pass
            client.disconnect()
        except OSError:
            return False
        return bool(acknowledged)

    def ssh(self, key: Path, user: str, *command: str, text: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command as a person does who logs in with a key."""
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        options += ["-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=120", "-i", str(key), "-p", str(self._ports[22])]
        return subprocess.run(
            ["ssh", *options, f"{user}@127.0.0.1", *command], input=text, capture_output=True, text=True, check=False
        )

    def wait_until_off(self) -> None:
        """Wait until it has switched itself off."""
        until_s = self.cpu_s + CPU_S_MAX
        while self._process.poll() is None:
            assert self.cpu_s < until_s, f"it does not switch itself off:\n{self.said()[-3_000:]}"
            time.sleep(0.2)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def second_disk(path: Path) -> list[str]:
    """Options for a disk that is there from the start, as /dev/vdb. The box looks for no updates on it."""
    options = ["-drive", f"if=none,file={path},format=raw,id=second,readonly=on"]
    return [*options, "-device", "virtio-blk-pci,drive=second,romfile="]


@contextmanager
def guest(drive: str | Path, log: Path, *, stick: Path | None = None, options: Sequence[str] = ()) -> Iterator[Guest]:
    """A machine with this card for the length of a `with`. A restart goes on in the same one.

    A stick is not plugged in before `Guest.plug_in`.
    """
    guests = (MQTT_PORT, PAGE_PORT, SSH_PORT)
    ports = dict(zip(guests, _free_ports(len(guests)), strict=True))
    forwards = "".join(f",hostfwd=tcp:127.0.0.1:{here}-:{there}" for there, here in ports.items())
    command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", "1", "-m", "512"]
    command += ["-display", "none", "-monitor", "none", "-bios", str(U_BOOT), "-serial", f"file:{log}"]
    command += ["-drive", f"if=none,file={drive},format=raw,id=card,cache=writeback"]
    command += ["-device", "virtio-blk-pci,drive=card,romfile=", "-device", "virtio-rng-pci"]
    command += ["-netdev", f"user,id=net{forwards}", "-device", "virtio-net-pci,netdev=net,romfile="]
    if stick is not None:
        command += ["-device", "qemu-xhci", "-drive", f"if=none,file={stick},format=raw,id=stick,readonly=on"]
        command += ["-qmp", f"unix:{log.with_suffix(MONITOR)},server=on,wait=off"]
    log.touch()
    with subprocess.Popen([*command, *options]) as process:
        try:
            yield Guest(process, log, ports)
        finally:
            process.kill()


@contextmanager
def raspberry_pi_3(image: Path, folder: Path) -> Iterator[Guest]:
    """A Raspberry Pi 3 with this card, a power of two long. U-Boot and the device tree are the card's own.

    Nobody has emulated the firmware that would load both, nor is there a network. Whoever arms the emulated watchdog
    restarts the machine at once, so systemd is told to leave it alone.
    """
    files = {name: folder / name for name in ("u-boot-rpi3.bin", "bcm2837-rpi-3-b.dtb")}
    for name, path in files.items():
        found = boot_file(image, name)
        assert found is not None, f"{name} is not on the card"
        path.write_bytes(found)
    words = boot_file(image, "cmdline.txt")
    assert words is not None
    put(image, "cmdline.txt", words.rstrip() + b" systemd.watchdog_sec=off\n")
    log = folder / "console"
    kernel, tree = files.values()
    command = ["qemu-system-aarch64", "-M", "raspi3b", "-m", "1G", "-display", "none", "-monitor", "none"]
    command += ["-kernel", str(kernel), "-dtb", str(tree), "-drive", f"if=sd,file={image},format=raw"]
    for number in range(2):
        command += ["-chardev", f"file,id=uart{number},path={log},append=on", "-serial", f"chardev:uart{number}"]
    log.touch()
    with subprocess.Popen(command) as process:
        try:
            yield Guest(process, log, {})
        finally:
            process.kill()
