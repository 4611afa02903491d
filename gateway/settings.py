"""The gateway's settings: what `gateway.toml` may say, with every default and every bound.

`config_file` reads the file and says what is wrong with it; here stands only what a setting is.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from gateway.record_contract import COMMANDS_TOPIC, DEVICE_NAME, NAME_RULE

Port = Annotated[int, Meta(ge=1, le=65535, description="a TCP port, 1 to 65535")]
Seconds = Annotated[float, Meta(gt=0, le=86_400, description="seconds, above 0 and at most 86400")]
Name = Annotated[str, Meta(pattern=f"^{DEVICE_NAME.pattern}$", description=NAME_RULE)]
Hours = Annotated[
    str,
    Meta(
        pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9]\Z",
        description='hours of the day in UTC, such as "22:00-05:00"',
    ),
]
DEFAULT_CONFIG = Path("/etc/sluice/gateway.toml")
METERED_LINGER_S = 1.0
"""Seconds that live readings wait for company on a metered link. A request for each would be mostly headers."""


class GatewaySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[gateway]`: this box, and the clock that it trusts."""

    id: Name
    """This gateway's name. Each gateway has its own."""
    namespace: Name = "default"
    """Name of the site or customer. It keeps device `42` of two sites apart."""
    key: Literal["name", "namespace/name"] = "name"
    """Kafka's key of a record: the device's name, with or without its namespace."""
    clock: Literal["kernel", "system"] = "kernel"
    """`kernel`: the box's clock counts once the kernel says that it is synced. `system`: the box's clock is trusted as
    it is."""
    hold_unsynced_s: Annotated[float, Meta(ge=0, le=86_400, description="seconds, 0 to 86400")] = 600.0
    """Seconds for which readings wait until the box's clock is known. They count from when Kafka was first reached."""
    hold_new_clock_s: Annotated[float, Meta(ge=0, le=3_600, description="seconds, 0 to 3600")] = 60.0
    """Seconds for which a sensor's first readings of a boot wait until its clock is known. Only readings with a tick
    wait. With 0 they go at once, without a bound for their time."""
    system_clock_error_ms: Annotated[float, Meta(ge=0, le=86_400_000, description="milliseconds, 0 to 86400000")] = (
        1_000.0
    )
    """Bound of the box's clock that you vouch for with `clock = "system"`."""
    clock_error_ppm_max: Annotated[float, Meta(ge=1, le=10_000, description="parts per million, 1 to 10000")] = 100.0
    """Greatest drift of the box's clock while nothing keeps it. A Raspberry Pi's crystal drifts by 50 at most."""
    time_ahead_s_max: Annotated[float, Meta(ge=0, le=86_400, description="seconds, 0 to 86400")] = 60.0
    """Seconds by which a sensor's own time may lie after the receipt of its reading. A later time is not believed."""
    time_behind_s_max: Annotated[float, Meta(ge=0, le=3.2e8, description="seconds, 0 to 320000000 (ten years)")] = (
        2_592_000.0
    )
    """Seconds by which a sensor's own time may lie before the receipt of its reading (30 days). An earlier time is not
    believed."""


class BufferSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[buffer]`: the SQLite file that keeps readings, and its bounds."""

    path: Path = Path("/var/lib/sluice/buffer.db")
    """The buffer file. Its folder must belong to the user `sluice`."""
    bytes_max: Annotated[int, Meta(ge=1_000_000, le=2**40, description="bytes, 1000000 (1 MB) to 1 TiB")] = (
        1_000_000_000
    )
    """Bytes of readings at which the buffer is full."""
    when_full: Literal["refuse", "drop-oldest"] = "refuse"
    """What a full buffer does. `refuse`: sensors keep their readings until there is room. `drop-oldest`: the oldest
    readings make room and are counted as lost."""
    fair_from: Annotated[float, Meta(ge=0.1, le=1, description="a share of the room, 0.1 to 1")] = 0.5
    """Share of the buffer above which each device may hold half of the free room. A device that wants more is refused,
    or loses its own oldest readings. With 1, a single device may fill the buffer."""
    free_bytes_min: Annotated[int, Meta(ge=0, le=2**40, description="bytes, 0 to 1 TiB")] = 16_000_000
    """Bytes that the buffer leaves free on its file system, for other programs."""
    age_max_s: Annotated[float, Meta(ge=0, le=3.2e8, description="seconds, 0 to 320000000 (ten years)")] = 0.0
    """Seconds after which a waiting reading is dropped and counted as lost. It is looked at once a minute. With 0, none
    is too old."""
    disk_after_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 500.0
    """Time that Kafka has for a reading before it is written to the disk. If Kafka has it by then, it is acknowledged
    and never written. A longer time spares the card and delays acknowledgements while Kafka is slow."""
    disk_first: bool = False
    """Whether every reading is written to the disk before it is acknowledged, even if Kafka has it already."""
    commit_delay_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 250.0
    """Time that a commit waits for further readings if the disk has them first, as while Kafka is away. A longer time
    spares the card and delays acknowledgements."""
    queue_bytes_max: Annotated[int, Meta(ge=100_000, le=2**31, description="bytes, 100000 to 2 GiB")] = 16_000_000
    """Bytes of readings that may wait in memory for their commit or for Kafka. Further readings are refused."""
    quarantine_bytes_max: Annotated[int, Meta(ge=100_000, le=2**40, description="bytes, 100000 to 1 TiB")] = 50_000_000
    """Bytes of input that the quarantine keeps, a tenth of `bytes_max` at most. When it is full, the device with most
    bytes in it loses its oldest input."""
    quarantine_rows_max: Annotated[int, Meta(ge=1, le=10_000_000, description="rows, 1 to 10000000")] = 10_000
    """Rows that the quarantine keeps."""
    damaged_files_max: Annotated[int, Meta(ge=1, le=100, description="files, 1 to 100")] = 3
    """Damaged files that are kept beside the buffer. Salvaged files go first. A file that goes before it was salvaged
    is counted as a loss."""

    @property
    def kafka_first_s(self) -> float:
        """Seconds that Kafka has for a reading before it is written to the disk; 0 if the disk always comes first."""
        return 0.0 if self.disk_first else self.disk_after_ms / 1000


class TlsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt_listener.tls]`: TLS 1.2 or 1.3 for sensors. The files are read again when they change."""

    certificate: Path
    """PEM file of the server's certificate, followed by the certificates that lead to its CA."""
    key: Path
    """PEM file of its private key, unencrypted."""
    port: Port = 8883
    """Port for TLS, beside the plain port."""
    client_ca: Path | None = None
    """PEM file of a CA. With it, every client needs a certificate of this CA. The certificate's common name may stand
    for user and password, and must be in `users` if there are any."""
    connections_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 1_000
    """Connections with TLS. Each takes much more memory than a plain one. They count for
    `mqtt_listener.connections_max` too."""


class ListenerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt_listener]`: sensors connect to this box with MQTT 3.1.1 or MQTT 5."""

    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` is all addresses of the box."""
    port: Annotated[int, Meta(ge=0, le=65535, description="a TCP port, 1 to 65535, or 0 for TLS alone")] = 1883
    """Port without TLS. 0 switches it off if there is a port with TLS."""
    tls: TlsSettings | None = None
    anonymous: bool = False
    """Whether anybody who reaches the port may write as any device. Without it, a client must log in."""
    users: dict[str, str] = field(default_factory=dict)
    """Device names, each with the SHA-256 of its secret in hex. A device writes under its own topics only."""
    devices_file: Path | None = None
    """File in which `sluice devices add` keeps the hashes of secrets, by default `devices.json` beside the buffer. It
    is read again when it changes."""
    operators: dict[str, str] = field(default_factory=dict)
    """Names of operators, each with the SHA-256 of its secret in hex. An operator may publish commands to every device,
    and nothing else."""
    command_topics: tuple[str, ...] = ("command/{device}/#",)
    """Topics that a device may subscribe to. `{device}` stands for its name."""
    commands_max: Annotated[int, Meta(ge=1, le=1_000, description="commands, 1 to 1000")] = 16
    """Commands with QoS 1 that may wait for one device. Further commands are not acknowledged."""
    commands_bytes_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 4_000_000
    """Bytes of all commands that wait."""
    sessions_max: Annotated[int, Meta(ge=1, le=100_000, description="sessions, 1 to 100000")] = 10_000
    """Sessions that are kept for clients without clean session. For a further one, the session that was without a
    connection for longest goes."""
    sessions_per_user_max: Annotated[int, Meta(ge=1, le=100_000, description="sessions, 1 to 100000")] = 8
    """Sessions that are kept for one user. Anonymous clients have no user, and only the bound of all."""
    session_expiry_s: Annotated[float, Meta(gt=0, le=3.2e8, description="seconds, above 0, at most 320000000")] = (
        604_800.0
    )
    """Seconds for which a session is kept after its last connection (a week). They begin anew when the gateway starts.
    An MQTT 5 client may ask for less."""
    qos2_unfinished_max: Annotated[int, Meta(ge=1, le=65_535, description="exchanges, 1 to 65535")] = 65_535
    """QoS 2 messages of one session that may wait for their PUBREL. There are as many packet identifiers."""
    qos2_unfinished_total_max: Annotated[int, Meta(ge=1, le=10_000_000, description="exchanges, 1 to 10000000")] = (
        150_000
    )
    """QoS 2 messages of all sessions that may wait for their PUBREL. Each takes some 110 bytes. No session may have
    more than it leaves to the others."""
    connections_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 5_000
    """Connections of all clients."""
    connections_per_user_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 8
    """Connections of one user or operator. Anonymous clients have no user, and only the bound of all."""
    packet_bytes_max: Annotated[int, Meta(ge=128, le=1_048_576, description="bytes, 128 to 1048576")] = 65_536
    """Bytes of the largest packet. A larger packet ends its connection."""
    inflight_bytes_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 4_000_000
    """Bytes of one connection that may wait for their commit. Beyond it, the connection is not read, and it is closed
    while the buffer takes nothing. While others send too, the bound is an eighth."""
    inflight_messages_max: Annotated[int, Meta(ge=1, le=1_000_000, description="messages, 1 to 1000000")] = 10_000
    """Messages of one connection that may wait for their commit."""
    inflight_bytes_total_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 8_000_000
    """Bytes of all connections that may wait for their commit. Beyond it, no connection is read until half is
    stored."""
    connect_timeout_s: Seconds = 10.0
    """Seconds that a connection may take for its TLS handshake, and then again for its CONNECT."""
    not_logged_in_per_address_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 250
    """Connections of one address (IPv6: its /64) that are heard and have not logged in. A further connection closes the
    oldest of them."""
    new_connections_per_s_max: Annotated[float, Meta(gt=0, le=100_000, description="a number, above 0 to 100000")] = (
        50.0
    )
    """Connections of one address (IPv6: its /64) that are heard in a second. Twice as many are heard at once. More wait
    up to 5 s for their turn, and those beyond that are closed at once."""
    failed_logins_per_minute_max: Annotated[int, Meta(ge=1, le=10_000, description="log-ins, 1 to 10000")] = 10
    """Wrong log-ins in a minute under a name of `users` or `operators`, from the address where it logged in last. As
    many may come from everywhere else. Beyond it, the right password is refused too. Secrets of `sluice devices add`
    have no such bound."""


Credential = Annotated[str, Meta(max_length=16_383, description="a text of at most 16383 characters")]
"""MQTT carries 65,535 bytes, and a character has up to four (section 1.5.3 of MQTT 3.1.1)."""
ClientId = Annotated[str, Meta(min_length=1, max_length=256, description="a text of 1 to 256 characters")]


class BrokerTlsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt_brokers.tls]`: TLS 1.2 or 1.3 to the broker. The files are read at each connection."""

    ca: Path | None = None
    """PEM file of the CA that signed the broker's certificate. Without it, the authorities that this box trusts
    count."""
    certificate: Path | None = None
    """PEM file of this gateway's certificate, if the broker wants one."""
    key: Path | None = None
    """PEM file of its private key, unencrypted."""


class BrokerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[mqtt_brokers]]`: a broker that the site has already, read with MQTT 3.1.1 or MQTT 5."""

    host: str
    """The broker's name or address."""
    topics: tuple[str, ...]
    """Topic filters, such as `device/#`. Shared subscriptions and filters that overlap are refused."""
    port: Port = 1883
    """The broker's port. With TLS it is mostly 8883."""
    version: Literal["3.1.1", "5"] = "3.1.1"
    """Version of MQTT that the gateway speaks to it. With 5, readings have their user properties."""
    qos: Literal[1, 2] = 1
    """Highest QoS of the subscription. A message comes with the lower of this QoS and its sender's."""
    client_id: ClientId | None = None
    """Name of the session at the broker. No other client may use it. By default it is `sluice-` and `gateway.id`."""
    user: Credential | None = None
    """User name for the broker."""
    password_file: Path | None = None
    """File that holds the password, readable by its owner alone (0400). It is read at each connection."""
    password: Credential | None = None
    """The password itself. Prefer `password_file`."""
    tls: BrokerTlsSettings | None = None
    keep_alive_s: Annotated[int, Meta(ge=5, le=3_600, description="seconds, 5 to 3600")] = 30
    """MQTT keep-alive of the connection."""
    packet_bytes_max: Annotated[int, Meta(ge=65_539, le=2**28, description="bytes, 65539 to 268435456")] = 1_048_576
    """Bytes of the largest message. A larger message is acknowledged, dropped and counted as lost, because the broker
    would send it for ever. Its topic and packet identifier must fit in this bound."""
    inflight_bytes_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 4_000_000
    """Bytes that may wait for their commit. Beyond it, the broker is not read."""
    connect_timeout_s: Seconds = 10.0
    """Seconds that the connection, TLS and CONNACK may each take."""
    backoff_s_min: Seconds = 1.0
    """Longest pause before the first attempt to connect again. It doubles with each attempt that fails."""
    backoff_s_max: Seconds = 30.0
    """Longest pause between two attempts. Each pause is a random share of it."""


Baud = Literal[300, 600, 1200, 2400, 4800, 9600, 19200, 38400, 57600, 115200, 230400, 250000, 460800, 921600]
"""Bits a second on a serial line, as adapters and sensors have them."""


FORMAT_RULE = "1 to 40 letters (a to z), digits or '_', starting with a letter"
"""A format's name in words: it is the name of a module of Python."""
Deadband = Annotated[float, Meta(ge=0, le=1e12, description="a number, 0 to 1e12")]
Parity = Literal["none", "even", "odd"]
Oscillator = Literal["rc", "ceramic", "crystal"]


class SerialTextSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.text]]`: a sensor that writes lines of text. It cannot be given an acknowledgement."""

    port: str
    """One port: its path, or a glob that matches one port (`/dev/serial/by-path/...` if adapters have no number)."""
    device: Name
    """Name of the device on this port. Its lines do not say it."""
    format: Literal["key=value", "key:value", "csv", "json", "nmea"]
    """`key=value`, `key:value`: pairs between spaces, commas or semicolons. `csv`: values in the order of `columns`.
    `json`: one object a line. `nmea`: NMEA 0183 sentences with their checksum."""
    stream: Name = "text"
    """The `{stream}` of the topic that routes see."""
    baud: Baud = 9600
    """Bits a second."""
    data_bits: Literal[7, 8] = 8
    """Data bits of a character."""
    parity: Parity = "none"
    """Parity. Many balances leave the factory with 7 data bits and even parity."""
    stop_bits: Literal[1, 2] = 1
    """Stop bits."""
    columns: tuple[str, ...] = ()
    """`csv`: a name for each value. An empty name leaves that value out."""
    delimiter: Literal[",", ";", "tab", "space"] = ","
    """`csv`: character between two values."""
    sentences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`nmea`: types of sentences to take (`MTW`, or `WIMTW` of one talker), each with names for its fields. An empty
    name leaves that field out. `[]` names the fields `1`, `2`, ... Without this setting, all types are taken."""
    units: tuple[str, ...] = ()
    """Units to leave out behind a number, in every field. With `["C", "D"]`, `21C` is 21 and `283D` is 283. Some units
    are known without this setting. Not for `json`, whose lines are forwarded as they are."""
    texts: tuple[str, ...] = ()
    """Fields that stay texts although they look like numbers, such as `28FF`, `2800` and `007`. Not for `json`."""
    line_bytes_max: Annotated[int, Meta(ge=16, le=65_536, description="bytes, 16 to 65536")] = 1_024
    """Bytes of the longest line. A longer line counts as one that cannot be read."""
    on_change: dict[str, Deadband] = field(default_factory=dict)
    """Members that are sent only when they moved, each with its deadband: `{ celsius = 0.2, door = 0 }`. A number has
    moved if it differs by more than the deadband from the number sent last, any other value if it differs."""
    silence_s_max: Seconds = 900.0
    """Seconds after which a member of `on_change` is sent although it has not moved."""


class SerialFormatSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.format]]`: a sensor whose bytes a format reads. It cannot be given an acknowledgement."""

    port: str
    """One port: its path, or a glob that matches one port."""
    device: Name
    """Name of the device on this port."""
    format: Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,39}$", description=FORMAT_RULE)]
    """`dsmr`: telegrams of an electricity meter's P1 port. `pms5003`, `sds011`: dust sensors. Any other name is a
    format of your own: a file `NAME.py` in `folder`, or an entry point of an installed package."""
    folder: Path = Path("/etc/sluice/formats")
    """Folder of formats of your own. Only root may write in it, or in a folder above it."""
    stream: Name | None = None
    """The `{stream}` of the topic that routes see. By default it is the format's name."""
    baud: Baud = 9600
    """Bits a second. A P1 port of today sends 115200."""
    data_bits: Literal[7, 8] = 8
    """Data bits of a character."""
    parity: Parity = "none"
    """Parity."""
    stop_bits: Literal[1, 2] = 1
    """Stop bits."""
    on_change: dict[str, Deadband] = field(default_factory=dict)
    """Members that are sent only when they moved, each with its deadband: `{ celsius = 0.2, door = 0 }`. A number has
    moved if it differs by more than the deadband from the number sent last, any other value if it differs."""
    silence_s_max: Seconds = 900.0
    """Seconds after which a member of `on_change` is sent although it has not moved."""


class ModbusRegister(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.modbus.units.registers]]`: one value of a unit, and the registers that hold it."""

    name: str
    """Name of the value in the payload."""
    address: Annotated[int, Meta(ge=0, le=65_535, description="a register's address, 0 to 65535")]
    """Address in the request, from 0. A manual's 40001 or 30001 is 0."""
    table: Literal["holding", "input", "coil", "discrete"] = "holding"
    """Table of the register."""
    type: Literal["u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64", "bit"] = "u16"
    """Type of the number. `bit` is for `coil` and `discrete`. A type above 16 bits takes several registers, the first
    one at `address`."""
    word_order: Annotated[
        Literal["ABCD", "CDAB", "BADC", "DCBA", "high-first", "low-first"],
        Meta(
            description='one of "ABCD" (as the standard has it), "CDAB" (registers swapped), "BADC" (the two bytes '
            'of each register swapped), "DCBA" (all bytes reversed)'
        ),
    ] = "ABCD"
    """Order of a number's bytes. A is the most significant of four. `BADC` and `DCBA` swap the bytes of a 16-bit number
    too. `high-first` and `low-first` are older names of `ABCD` and `CDAB`."""
    scale: Annotated[float, Meta(gt=0, le=1e12, description="a number, above 0 and at most 1e12")] = 1.0
    """Factor for the register's number, such as 0.1 if it counts tenths."""
    offset: float = 0.0
    """Number that is added after `scale`."""
    null_if: Annotated[
        tuple[int, ...], Meta(description="a list of whole numbers, without quotes, such as [65535] or [0x8000]")
    ] = ()
    """Numbers by which a unit says that it has no value. They become `null`. They are compared before `scale` and
    `offset`. For signed types, -32768 and 0x8000 are the same number."""
    on_change: Deadband | None = None
    """Deadband of a value that is sent only when it moved: when it differs by more than this from the value sent last.
    With 0, any other value is sent."""


class ModbusUnit(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.modbus.units]]`: one unit on the line."""

    unit: Annotated[int, Meta(ge=1, le=247, description="a unit's address, 1 to 247")]
    """Address of the unit."""
    device: Name
    """Name of the device."""
    registers: tuple[ModbusRegister, ...]
    stream: Name = "modbus"
    """The `{stream}` of the topic that routes see."""
    interval_s: Annotated[float, Meta(ge=0.05, le=86_400, description="seconds, 0.05 to 86400")] = 10.0
    """Seconds from one poll to the next."""
    silence_s_max: Seconds = 900.0
    """Seconds after which a register with `on_change` is sent although it has not moved."""


class SerialModbusSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.modbus]]`: Modbus RTU on one line. An RS-485 line holds several units, polled one after another."""

    port: str
    """One port: its path, or a glob that matches one port."""
    units: tuple[ModbusUnit, ...]
    baud: Baud = 9600
    """Bits a second."""
    parity: Parity = "even"
    """Parity. The standard's default is even with one stop bit. Many devices leave the factory with none."""
    stop_bits: Literal[1, 2] = 1
    """Stop bits."""
    timeout_s: Annotated[float, Meta(ge=0.02, le=60, description="seconds, 0.02 to 60")] = 0.5
    """Seconds to wait for a unit's answer."""
    retries: Annotated[int, Meta(ge=0, le=10, description="times, 0 to 10")] = 1
    """Repetitions of a request without an answer. After them the unit is silent until its next poll."""


class SerialSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[serial]`: sensors on serial lines.

    A port that `text`, `format` or `modbus` names is theirs, although `ports` matches it.
    """

    ports: tuple[str, ...] = ()
    """Ports of sensors that speak our frames: paths, globs (`/dev/serial/by-id/*`), or "all" for every USB adapter.
    They may come and go."""
    baud: Baud = 38400
    """Bits a second."""
    topic: str = "device/{device}/{stream}"
    """Topic that routes see, made from the sensor's names of its device and stream."""
    probe_interval_s: Seconds = 10.0
    """Seconds between two probes of a sensor's clock."""
    oscillator: Oscillator = "rc"
    """Worst oscillator of the sensors: `rc` is within 10,000 ppm, `ceramic` within 5,000, `crystal` within 100. The
    bounds of times follow from it."""
    scan_interval_s: Seconds = 1.0
    """Seconds between two searches for ports."""
    text: tuple[SerialTextSettings, ...] = ()
    format: tuple[SerialFormatSettings, ...] = ()
    modbus: tuple[SerialModbusSettings, ...] = ()

    @property
    def names_ports(self) -> bool:
        """Whether the settings name any port. It need not exist."""
        return bool(self.ports or self.text or self.format or self.modbus)


PayloadIdentity = Literal["none", "json", "cbor", "binary", "properties"]
TimeSource = Literal["auto", "receipt", "tick", "senml", "timestamp", "property"]
Envelope = Literal["binary", "structured", "both"]


class RouteSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[routes]]`: MQTT topics, their Kafka topic and key, and what their payload says."""

    topic: str
    """MQTT topic as a template, such as `device/{device}/{stream}`. `+` stands for one level, `#` at the end for any
    number."""
    kafka: str
    """Kafka topic as a template, such as `device-{stream}`."""
    content_type: str = "application/json"
    """Content type of the payload."""
    identity: PayloadIdentity = "none"
    """Place of the sensor's `boot` and `seq`, and of its `tick` if it has one. `json`: members of a JSON object.
    `cbor`: members of a CBOR map. `binary`: 17 bytes before the value. `properties`: user properties of MQTT 5. See
    docs/payloads.md."""
    time: TimeSource = "auto"
    """Source of a reading's time. `auto`: the sensor's tick if the identity has one, else the receipt. `tick`: as
    `auto`, and readings without a tick are counted. `receipt`: always the receipt. `senml`: the time in a SenML pack.
    `timestamp`: the member `timestamp`, in milliseconds since 1970. `property`: the same as a user property of MQTT 5.
    Sensors with our serial frames always send a tick."""
    time_error_ms: Annotated[float, Meta(ge=0, le=86_400_000, description="milliseconds, 0 to 86400000")] = 1_000.0
    """`senml`, `timestamp`, `property`: greatest error of the sensor's own time. You vouch for it."""
    oscillator: Oscillator = "rc"
    """Worst oscillator of the sensors, as in `[serial]`."""
    least_delay_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 50.0
    """Longest time that the quickest of sixteen readings takes from measurement to receipt. A mobile or satellite
    network takes longer. Bounds of times that follow from ticks are as wide as this."""
    device: Name | None = None
    """Name of the device if the topic has none that keeps the rule, such as `living-room` for `zigbee2mqtt/Living
    room`. Such a route goes before routes with `{device}`."""
    names: Literal["refuse", "escape"] = "refuse"
    """What happens to a name that breaks the rule of names. `refuse`: its readings go to the quarantine. `escape`: the
    name is rewritten (`x--Wohnzimmer-20-Lampe`), and a header keeps the original."""
    key: str = "{device}"
    """Name of the device in Kafka's key and in the tables. It holds variables of the topic and fixed names, with `/`
    between them. `{site}/{device}` keeps equal names of two sites apart. `gateway.key` may put the namespace in
    front."""
    envelope: Envelope = "binary"
    """Form of the records. `binary`: the value is the payload, and headers say the rest. `structured`: the value is a
    CloudEvents JSON event that says everything, for consumers that see only values. `both`: binary records here, and
    events in `kafka.structured_topic`. See docs/consumers.md."""


class KafkaTlsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka.tls]`: TLS 1.2 or 1.3 to the brokers, always verified. Files are read again when they change."""

    ca: Path | None = None
    """PEM file of the CA that signed the brokers' certificates. Without it, the authorities that this box trusts
    count."""
    certificate: Path | None = None
    """PEM file of this gateway's certificate, if the brokers want one."""
    key: Path | None = None
    """PEM file of its private key, unencrypted."""


OAUTHBEARER = "OAUTHBEARER"


class KafkaSaslSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka.sasl]`: the gateway's log-in at the brokers."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
    """Mechanism of the log-in. PLAIN sends the password itself, and OAUTHBEARER an access token. So they need
    `[kafka.tls]`."""
    user: str
    """User name of this gateway. OAUTHBEARER: the client's id."""
    password_file: Path
    """File with the password in its first line, readable by its owner alone (0400). It is read again when it changes.
    OAUTHBEARER: the client's secret."""
    token_url: str | None = None
    """OAUTHBEARER: URL (`https://...`) that gives access tokens for client credentials."""
    scope: str | None = None
    """OAUTHBEARER: scope to ask for, or several with blanks between them."""
    token_ca: Path | None = None
    """OAUTHBEARER: PEM file of the CA that signed the certificate of `token_url`. Without it, the authorities that this
    box trusts count."""
    extensions: dict[str, str] = field(default_factory=dict)
    """OAUTHBEARER: extensions that the brokers want beside the token, such as `{ logicalCluster = "lkc-1" }`."""


class KafkaSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka]`: the brokers, and how readings go to them."""

    bootstrap: tuple[str, ...]
    """`host:port` of one or more brokers, 32 at most. IPv6 is `[address]:port`."""
    tls: KafkaTlsSettings | None = None
    sasl: KafkaSaslSettings | None = None
    create_topics: bool = False
    """Whether the gateway may create a missing topic, with LogAppendTime."""
    topics_per_device_day_max: Annotated[int, Meta(ge=1, le=10_000, description="topics, 1 to 10000")] = 20
    """Topics that the gateway creates for one device in a day (UTC). Readings for further new topics go to the
    quarantine. Topics that exist are not concerned."""
    topics_created_max: Annotated[int, Meta(ge=1, le=100_000, description="topics, 1 to 100000")] = 1_000
    """Topics that the gateway creates in all. A topic that was deleted no longer counts. Raise it if a route makes a
    topic for each device."""
    partitions: Annotated[int, Meta(ge=1, le=10_000, description="partitions, 1 to 10000")] = 3
    """Partitions of a topic that the gateway creates."""
    replicas: Annotated[int, Meta(ge=1, le=32, description="replicas, 1 to 32")] = 3
    """Replicas of a topic that the gateway creates. With fewer brokers, there are as many as brokers."""
    one_replica_is_enough: bool = False
    """Whether a reading is safe if one broker alone has it. Without this, a topic whose `min.insync.replicas` is 1 gets
    readings only once they are on the disk of this box."""
    retention_s_min: Annotated[float, Meta(ge=0, le=3.2e8, description="seconds, 0 to 320000000 (ten years)")] = (
        86_400.0
    )
    """Least retention of a topic (a day). A topic that keeps readings for less is not written to."""
    compression: Literal["zstd", "lz4", "gzip", "snappy", "none"] = "zstd"
    """Compression of batches."""
    events_topic: str = "gateway-events"
    """Topic of heartbeats, loss records and other events of this gateway."""
    quarantine_topic: str = "gateway-quarantine"
    """Topic of reports on input in the quarantine."""
    record_bytes_max: Annotated[int, Meta(ge=65_536, le=100_000_000, description="bytes, 65536 to 100000000")] = 900_000
    """Bytes of the largest record, with its headers. A larger record goes to the quarantine. A heartbeat names every
    lane that waits, and must fit."""
    batch_rows_max: Annotated[int, Meta(ge=100, le=100_000, description="rows, 100 to 100000")] = 5_000
    """Rows of one partition in a request. With few rows, headers are most of a request."""
    linger_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 50.0
    """Time that a live reading waits for others before it is sent, a quarter of `live_age_s_max` at most. On a metered
    link it is a second at least. A backlog does not wait."""
    drain: Literal["live-first", "oldest-first"] = "live-first"
    """Order after an outage. `live-first`: new readings go at once, beside the backlog. `oldest-first`: readings go in
    the order in which they came."""
    backlog_share: Annotated[float, Meta(ge=0.05, le=0.95, description="a share, 0.05 to 0.95")] = 0.5
    """`live-first`: share of the link that the backlog gets while live readings wait too. Each may use what the other
    leaves."""
    backlog_topic: str | None = None
    """Topic of the backlog, as a template such as `{topic}.backlog`. Without it, the backlog goes to the topic of live
    readings."""
    structured_topic: str = "structured-{topic}"
    """Topic of structured events beside binary records, as a template, for routes with `envelope = "both"`. A reading
    stays in the buffer until both topics have it."""
    latest_topic: str | None = None
    """Compacted topic of the last reading of each device, as a template such as `latest-{topic}`. Each topic of
    readings has such a topic then. Its records are structured events."""
    live_age_s_max: Annotated[float, Meta(ge=5, le=86_400, description="seconds, 5 to 86400")] = 30.0
    """Seconds after which a live reading that still waits becomes backlog. That happens on a link that is too slow."""
    lane_s_min: Annotated[float, Meta(ge=0, le=3_600, description="seconds, 0 to 3600")] = 10.0
    """Least length of a lane. It keeps an uplink that comes and goes from beginning a lane each time."""
    lanes_max: Annotated[int, Meta(ge=2, le=1_000, description="lanes, 2 to 1000")] = 64
    """Lanes that hold readings. Beyond it, only a start of the gateway begins a further lane."""
    bytes_per_s_max: Annotated[int, Meta(ge=0, le=2**40, description="bytes, 0 to 1 TiB")] = 0
    """Bytes a second that the uplink may use of a metered link, counted on the wire. 0 is no bound."""
    bytes_per_day_max: Annotated[int, Meta(ge=0, le=2**50, description="bytes, 0 to 1 PiB")] = 0
    """Bytes a day (UTC) that the uplink may use of a metered link. When they are used up, readings wait on disk until
    the next day. 0 is no bound."""
    connect_timeout_s: Annotated[float, Meta(ge=0.5, le=120, description="seconds, 0.5 to 120")] = 5.0
    """Seconds for a connection to a broker with its TLS handshake, and then again for the log-in. It must be less than
    `request_timeout_s`."""
    request_timeout_s: Annotated[float, Meta(ge=1, le=600, description="seconds, 1 to 600")] = 30.0
    """Seconds that a request may take. The size of requests follows from what the link carried before."""
    backoff_s_max: Annotated[float, Meta(ge=0.25, le=3_600, description="seconds, 0.25 to 3600")] = 5.0
    """Longest pause between two attempts to reach Kafka."""
    heartbeat_interval_s: Annotated[float, Meta(ge=0.5, le=86_400, description="seconds, 0.5 to 86400")] = 10.0
    """Seconds between two heartbeats."""

    @property
    def is_metered(self) -> bool:
        """Whether the bytes on the link are bounded."""
        return bool(self.bytes_per_s_max or self.bytes_per_day_max)

    @property
    def linger_s(self) -> float:
        """Seconds that a live reading waits for others before it is sent."""
        return max(self.linger_ms / 1000, METERED_LINGER_S if self.is_metered else 0.0)

    def is_latest(self, topic: str) -> bool:
        """Whether `latest_topic` makes such a name."""
        return self.latest_topic is not None and topic_behind(self.latest_topic, topic) != ""

    def echoed_in(self, topic: str) -> list[str]:
        """The topics whose readings may have further records in a topic with such a name. Routes say if they have."""
        templates = (self.structured_topic, self.latest_topic)
        return [behind for each in templates if each is not None and (behind := topic_behind(each, topic))]


def topic_behind(template: str, topic: str) -> str:
    """The topic that a template with `{topic}` makes such a name from; empty if it does not make the name."""
    first, _, last = template.partition("{topic}")
    is_made = len(topic) > len(first + last) and topic.startswith(first) and topic.endswith(last)
    return topic[len(first) : len(topic) - len(last)] if is_made else ""


class CommandSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[commands]`: commands from the cloud to devices.

    Without this section, none are read.
    """

    devices: tuple[str, ...]
    """Names of devices that may be commanded, or patterns such as `heater-*`. `*` alone stands for all devices."""
    topic: str = COMMANDS_TOPIC
    """Kafka topic of the commands for this gateway. `{gateway}` stands for `gateway.id`."""
    per_device_max: Annotated[int, Meta(ge=1, le=1_000, description="commands, 1 to 1000")] = 16
    """Commands that may wait for one device. Further commands are refused."""
    bytes_max: Annotated[int, Meta(ge=20_000, le=2**30, description="bytes, 20000 to 1 GiB")] = 4_000_000
    """Bytes of all commands that may wait. Each counts 500 beside its payload."""

    def topic_of(self, gateway: str) -> str:
        """The topic of the gateway with this `gateway.id`."""
        return self.topic.replace("{gateway}", gateway)


class StatusPageSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[status_page]`: the state of the gateway for a browser, for Prometheus (`/metrics`) and for `/health`.

    Without this section there is no page.
    """

    host: str = "0.0.0.0"  # noqa: S104 - the LAN is whom it is for; who asks from elsewhere is refused
    """Address to listen on. Requests from outside private networks are refused in any case."""
    port: Port = 8080
    """Port of the page."""
    password_file: Path = Path("/etc/sluice/credentials/status-page")
    """Hash of the page's password, written by `sluice setup`. Without that file nobody is let in."""
    connections_max: Annotated[int, Meta(ge=1, le=1_000, description="connections, 1 to 1000")] = 32
    """Connections of this box and of addresses where somebody has logged in. All other addresses together have as
    many."""
    history_devices_max: Annotated[int, Meta(ge=1, le=10_000, description="devices, 1 to 10000")] = 200
    """Devices whose last hour is kept in memory. Beyond it, devices that nobody looks at give way."""


class FleetSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[fleet]`: a folder in the network that says which version and settings this box is to have.

    Without this section, the box looks at no folder, and changes nothing by itself.
    """

    url: str
    """Folder (`https://...`) with `fleet.toml`, its signature `fleet.toml.sig`, and the packages. See docs/fleet.md."""
    ca: Path | None = None
    """PEM file of the CA that signed the folder's certificate. Without it, the authorities that this box trusts
    count."""
    hours: Hours | None = None
    """Hours of the day (UTC) in which this box may change. Hours in `fleet.toml` hold too. Without either, the whole
    day."""


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[log]`: what the gateway writes to its log (standard error)."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of a line."""
    format: Literal["text", "json"] = "text"
    """Form of a line."""


DEFAULT_ROUTE = RouteSettings(topic="device/{device}/{stream}", kafka="device-{stream}")
NO_SOURCE = (
    "nothing comes in: no section says where from; write [mqtt_listener] for sensors that connect to this box, "
    "[[mqtt_brokers]] for a broker of the site, or [serial] with ports"
)
"""Said by `sluice check`, `sluice run` and `sluice status` alike, where not `Settings.has_source`."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `gateway.toml`. A source without its section is not started."""

    gateway: GatewaySettings
    kafka: KafkaSettings
    buffer: BufferSettings = BufferSettings()
    mqtt_listener: ListenerSettings | None = None
    mqtt_brokers: tuple[BrokerSettings, ...] = ()
    serial: SerialSettings | None = None
    routes: tuple[RouteSettings, ...] = (DEFAULT_ROUTE,)
    fallback_topic: str | None = None
    """Kafka topic for MQTT topics without a route. Without it they go to the quarantine."""
    commands: CommandSettings | None = None
    status_page: StatusPageSettings | None = None
    fleet: FleetSettings | None = None
    log: LogSettings = LogSettings()

    @property
    def has_source(self) -> bool:
        """Whether the settings name any source of readings. The source need not exist."""
        on_serial = self.serial is not None and self.serial.names_ports
        return on_serial or self.mqtt_listener is not None or bool(self.mqtt_brokers)
