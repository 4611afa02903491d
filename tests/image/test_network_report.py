"""An installer who cannot reach the box reads on its card what became of the network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from image import network_report
from image.network_report import Interface

CABLE = Interface("eth0", is_wifi=False, has_carrier=True, addresses=["192.168.1.20"])
WIFI = Interface("wlan0", is_wifi=True, has_carrier=False, addresses=[], wifi_name="Farm")
WRONG_KEY = 'wlan0: CTRL-EVENT-SSID-TEMP-DISABLED id=0 ssid="Farm" auth_failures=1 duration=10 reason=WRONG_KEY\n'
NOT_FOUND = "wlan0: CTRL-EVENT-NETWORK-NOT-FOUND\n"


def last_line(interface: Interface, said: str = "") -> str:
    return network_report.text("barn-1", [interface], said).splitlines()[-1]


def test_addresses_are_told_and_the_name_to_open() -> None:
    told = network_report.text("barn-1", [CABLE, WIFI], "")
    assert told.splitlines()[:2] == [
        "Name of this box: barn-1 (on this network barn-1.local)",
        "eth0, cable: 192.168.1.20",
    ]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "it is not connected"),
        (WRONG_KEY, "the password is not the one"),
        (NOT_FOUND, "no access point with this name"),
        (NOT_FOUND + WRONG_KEY, "the password is not the one"),
        (WRONG_KEY + NOT_FOUND, "no access point with this name"),
    ],
)
def test_wifi_without_an_address_says_why(said: str, words: str) -> None:
    assert last_line(WIFI, said).startswith('wlan0, Wi-Fi "Farm": no address')
    assert words in last_line(WIFI, said)


def test_an_interface_without_an_address_says_why() -> None:
    assert "DHCP" in last_line(Interface("wlan0", is_wifi=True, has_carrier=True, addresses=[], wifi_name="Farm"))
    assert "DHCP" in last_line(Interface("eth0", is_wifi=False, has_carrier=True, addresses=[]))
    assert "no cable" in last_line(Interface("eth0", is_wifi=False, has_carrier=False, addresses=[]))


def test_wifi_that_nobody_asked_for_is_not_told() -> None:
    assert last_line(Interface("wlan0", is_wifi=True, has_carrier=False, addresses=[])).startswith("Name")


def test_what_ip_says_is_read() -> None:
    told = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, check=True).stdout
    named = {link["ifname"] for link in json.loads(told) if link["link_type"] == "ether"}
    found = list(network_report.interfaces(told, []))
    assert {interface.name for interface in found} == named
    assert all(interface.has_carrier for interface in found if interface.addresses)


def test_names_of_wifi_are_read_as_netplan_writes_them() -> None:
    configuration = (
        'ctrl_interface=/run/wpa_supplicant\nnetwork={\n  ssid=P"a \\"b\\""\n  psk=12\n}\nnetwork={\n  ssid="c"\n}\n'
    )
    assert network_report.wifi_names(configuration) == ['a \\"b\\"', "c"]


def test_the_report_is_written_once_and_again_when_it_says_something_else(tmp_path: Path) -> None:
    def write() -> int:
        subprocess.run([sys.executable, "-IS", network_report.__file__, file], check=True)
        return file.stat().st_mtime_ns

    file = tmp_path / "sluice-network.txt"
    first = write()
    assert file.read_text().startswith("Name of this box: ")
    assert write() == first
    file.write_text("another time")
    write()
    assert file.read_text().startswith("Name of this box: ")
