"""The codes of conditions of a running gateway: what each means, and what to do from afar.

The gateway's own words (`health/conditions.py`) name devices, ports and figures. Somebody who has only the code, as in
the cloud, reads these. What is to be done stands here alone, unless the gateway knows more: a name, a figure, a command
for that very case. docs/conditions.md has the meanings.
"""

from typing import Final, Literal, NamedTuple, get_args

Level = Literal["bad", "warn", "note"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""Levels of conditions, the worst first."""


class ConditionCode(NamedTuple):
    """The words on one code."""

    means: str
    todo: str = ""
    """Empty if there is nothing to do."""


_POWER = "Check its power, and its line or radio."
_SENDS = "Correct what the sensor sends: sluice devices on the box names it."
_PORTS = "Look at the port: sluice check on the box lists all ports."
CODES = {
    "disk-failing": ConditionCode(
        "The buffer cannot be written. Only what Kafka takes first is acknowledged.",
        "See that the card or disk is there and has room. If it stays so, replace it.",
    ),
    "disk-hangs": ConditionCode(
        "Only on `/health`: the buffer's thread does not answer.",
        "Restart the box. If it comes again, replace the disk.",
    ),
    "disk-trouble": ConditionCode(
        "The disk or its file system reports errors or wear, or does not suit a buffer.",
        "sluice check on the box says which. Have another disk or card ready.",
    ),
    "card-wears-out": ConditionCode(
        "At the present rate, a plain memory card lasts less than a year.",
        "Use a card sold for endurance or an SSD, or let Kafka have readings first.",
    ),
    "update-on-trial": ConditionCode("A new image runs, and was not found good yet."),
    "update-went-back": ConditionCode(
        "A new image was given up, and the version before runs again.",
        "Mend the cause (update_reason), or install another version.",
    ),
    "update-refused": ConditionCode(
        "The stick that is plugged in brings no update that this box takes.",
        "Pull the stick out, and bring the right file on it.",
    ),
    "fleet-on-trial": ConditionCode("What the fleet's file wants was put in place, and was not found good yet."),
    "fleet-went-back": ConditionCode(
        "What the fleet's file wants was given up, and the box goes back or went back.",
        "Mend the cause. Then publish another change, or raise the group's attempt.",
    ),
    "fleet-refused": ConditionCode(
        "What the fleet's file wants cannot be tried on this box.",
        "Correct what the file wants of this box.",
    ),
    "fleet-unread": ConditionCode(
        "Nothing was taken in from the fleet's folder.", "Look at the folder, and at fleet.url."
    ),
    "buffer-set-aside": ConditionCode(
        "The buffer's file could not be used. A new one took its place.",
        "If this comes again, replace the memory card.",
    ),
    "buffer-newer": ConditionCode(
        "A newer version wrote the buffer's file. Its readings wait for that version.",
        "Update this box. Do not remove that file.",
    ),
    "buffer-full": ConditionCode(
        "The buffer has no room.",
        "Get Kafka reached again, or give the buffer more room (buffer.bytes_max, free space on the disk).",
    ),
    "buffer-fills": ConditionCode(
        "The buffer will soon have no room.", "Get Kafka reached again, or raise buffer.bytes_max."
    ),
    "above-share": ConditionCode(
        "Devices hold more than their share of the buffer.",
        "Look at their readings: sluice devices revoke keeps out a stolen one. Else get Kafka reached again, or raise "
        "buffer.bytes_max.",
    ),
    "settings-changed": ConditionCode(
        "The file has other settings than the running gateway.", "Run sudo systemctl restart sluice on the box."
    ),
    "no-source": ConditionCode(
        "No section of the settings says where readings come from.",
        "Add [mqtt_listener], [[mqtt_brokers]] or [serial].",
    ),
    "clock-unsynced": ConditionCode(
        "This box's clock is not synced.", "See that time sync by NTP reaches its server (timedatectl)."
    ),
    "clock-set": ConditionCode(
        "This box's clock was set although it was synced.", "See who does it: two time services, a person, a host."
    ),
    "certificate-dates-unknown": ConditionCode(
        "Without a synced clock, dates of certificates are checked only in part."
    ),
    "kafka-unreached": ConditionCode(
        "Kafka does not answer.",
        "Check the network and the settings under [kafka]: sluice check goes through the way step by step.",
    ),
    "kafka-unusable": ConditionCode(
        "Kafka is reached, but a log-in, a certificate or a file is refused.",
        "Check the log-in, the certificates and their files: sluice check says which.",
    ),
    "kafka-throttles": ConditionCode(
        "A quota of Kafka's slows this gateway down.", "Have producer_byte_rate raised for this client or its user."
    ),
    "quota-used-up": ConditionCode(
        "`kafka.bytes_per_day_max` is used up.", "Raise it if the contract with the network allows."
    ),
    "topic-unwritten": ConditionCode(
        "A topic would lose readings, or refuses them. Its readings wait in the quarantine.",
        "Have the topic mended: sluice check on the box has the command.",
    ),
    "topics-beyond-limit": ConditionCode(
        "A device needs more new topics than the gateway makes.",
        "Look at its readings. If they are right, create the topics, or raise kafka.topics_per_device_day_max.",
    ),
    "partition-parked": ConditionCode("A partition takes nothing. Its readings wait.", "See to the cluster's brokers."),
    "readings-lost": ConditionCode(
        "Readings were lost for good within the last hour.", "sluice-cloud losses says whose, and why."
    ),
    "readings-missing": ConditionCode("Sequence numbers of a device are missing.", _POWER),
    "device-silent": ConditionCode("A device is silent for longer than usual.", _POWER),
    "device-finding": ConditionCode("Something of a device is to be mended.", "sluice devices on the box says what."),
    "devices-unheard": ConditionCode(
        "No device was heard since the start.", "See that sensors have the box's address, port and a secret of theirs."
    ),
    "devices-file-unusable": ConditionCode(
        "The file of devices' secrets cannot be used as it is.", "sluice check on the box says why."
    ),
    "log-in-refused": ConditionCode(
        "A sensor's log-in was refused.", "Correct its name or secret: journalctl -u sluice names it."
    ),
    "identity-missing": ConditionCode("Readings came without the `boot` and `seq` of their route.", _SENDS),
    "payload-not-json": ConditionCode("Readings came without the JSON of their route.", _SENDS),
    "time-missing": ConditionCode("Readings came without the time of their route.", _SENDS),
    "tick-unreadable": ConditionCode("Readings came with a tick that cannot be read.", _SENDS),
    "device-time-ahead": ConditionCode("Readings came with a time too far ahead.", "Set the clocks of these sensors."),
    "device-time-behind": ConditionCode(
        "Readings came with a time too far behind.", "Set the clocks of these sensors."
    ),
    "quarantine": ConditionCode(
        "Input could not be forwarded, and is kept in the quarantine.",
        "sluice buffer quarantine ls on the box says what to do about each reason.",
    ),
    "broker-unconnected": ConditionCode("The site's broker is not connected.", "Check that it runs."),
    "broker-refuses": ConditionCode(
        "The site's broker refuses the connection or a topic.", "Correct the log-in, or what it may read."
    ),
    "commands-unread": ConditionCode("Commands from the cloud cannot be read.", "sluice status on the box says why."),
    "serial-rivals": ConditionCode("Another program reads or takes a serial port.", "End that program."),
    "serial-name-twice": ConditionCode(
        "One device's name stands on several ports.", "Give each device a name of its own."
    ),
    "serial-trouble": ConditionCode("Nothing usable comes from a port.", _PORTS),
    "serial-unit-unread": ConditionCode(
        "A unit on a line does not answer as it should.", "Check its power, wires, address and baud."
    ),
    "serial-unopened": ConditionCode("A port cannot be opened.", _PORTS),
    "serial-gone": ConditionCode("A port vanished.", "Plug it in again."),
    "serial-missing": ConditionCode("A port of the settings does not exist.", _PORTS),
    "serial-awaited": ConditionCode("No port fits a pattern yet."),
}
"""By code, in the order of the page."""
