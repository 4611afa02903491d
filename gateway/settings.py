"""The gateway's settings: what `gateway.toml` may say, with every default and every bound.

`config_file` reads the file and says what is wrong with it; here stands only what a setting is.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from gateway.record_contract import DEVICE_NAME, NAME_RULE

Port = Annotated[int, Meta(ge=1, le=65535, description="a TCP port, 1 to 65535")]
Seconds = Annotated[float, Meta(gt=0, le=86_400, description="seconds, above 0 and at most 86400")]
Name = Annotated[str, Meta(pattern=f"^{DEVICE_NAME.pattern}$", description=NAME_RULE)]
DEFAULT_CONFIG = Path("/etc/sluice/gateway.toml")


class GatewaySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[gateway]`: who this box is and which clock it trusts."""

    id: Name
    namespace: Name = "default"
    """The site or customer: keeps two sites' device `42` apart."""
    key: Literal["name", "namespace/name"] = "name"
    """What the Kafka key is: the device's name as it knows it, or with its namespace."""
    clock: Literal["kernel", "system"] = "kernel"
    """`kernel`: wall time counts once adjtimex says that it is synced. `system`: it is trusted as it is."""
    hold_unsynced_s: Annotated[float, Meta(ge=0, le=86_400, description="seconds, 0 to 86400")] = 600.0
    """How long forwarding waits for the clock to be learnt."""
    hold_new_clock_s: Annotated[float, Meta(ge=0, le=3_600, description="seconds, 0 to 3600")] = 60.0
    """How long at the most the first readings of a sensor's boot wait, where they carry a tick, for its clock to be
    known: with 0 they go at once, without a bound for their time."""
    system_clock_error_ms: Annotated[float, Meta(ge=0, le=86_400_000, description="milliseconds, 0 to 86400000")] = (
        1_000.0
    )
    """The bound that the installer vouches for where `clock = "system"`."""
    clock_error_ppm_max: Annotated[float, Meta(ge=1, le=10_000, description="parts per million, 1 to 10000")] = 100.0
    """How far this box's own clock may run from true while nothing keeps it: a Raspberry Pi's crystal is within 50."""
    time_ahead_s_max: Annotated[float, Meta(ge=0, le=86_400, description="seconds, 0 to 86400")] = 60.0
    """How much later than its receipt a sensor may say that a reading was taken, where it sends absolute times; one
    that says more is not believed."""
    time_behind_s_max: Annotated[float, Meta(ge=0, le=3.2e8, description="seconds, 0 to 320000000 (ten years)")] = (
        2_592_000.0
    )
    """How much earlier (30 days): no sensor keeps its readings for longer than that."""


class BufferSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[buffer]`: the SQLite file and its bounds."""

    path: Path = Path("/var/lib/sluice/buffer.db")
    bytes_max: Annotated[int, Meta(ge=1_000_000, le=2**40, description="bytes, 1000000 (1 MB) to 1 TiB")] = (
        1_000_000_000
    )
    """Pages in use at which the buffer is full."""
    when_full: Literal["refuse", "drop-oldest"] = "refuse"
    """`refuse`: sensors keep what they have until there is room. `drop-oldest`: the oldest readings make room, counted
    in loss records."""
    fair_from: Annotated[float, Meta(ge=0.1, le=1, description="a share of the room, 0.1 to 1")] = 0.5
    """Where more than this share of its room is used, each device may hold half of what is free; above that it is
    refused, or its own oldest readings make room. 1 for a site with a single device: it may fill the buffer."""
    free_bytes_min: Annotated[int, Meta(ge=0, le=2**40, description="bytes, 0 to 1 TiB")] = 16_000_000
    """The file does not grow while its file system has less than this free: other programs share it."""
    age_max_s: Annotated[float, Meta(ge=0, le=3.2e8, description="seconds, 0 to 320000000 (ten years)")] = 0.0
    """Readings that waited longer than this are dropped, with loss records; 0 keeps them for ever."""
    commit_delay_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 0.0
    """How long a commit waits for company: longer spares the card and delays acknowledgements."""
    queue_bytes_max: Annotated[int, Meta(ge=100_000, le=2**31, description="bytes, 100000 to 2 GiB")] = 16_000_000
    """Readings waiting in memory for their commit, beyond which new ones are refused."""
    quarantine_bytes_max: Annotated[int, Meta(ge=100_000, le=2**40, description="bytes, 100000 to 1 TiB")] = 50_000_000
    """Input that cannot be forwarded, kept whole, its topics too; at most a tenth of `bytes_max`. The oldest of the
    device that has most there makes room."""
    quarantine_rows_max: Annotated[int, Meta(ge=1, le=10_000_000, description="rows, 1 to 10000000")] = 10_000
    damaged_files_max: Annotated[int, Meta(ge=1, le=100, description="files, 1 to 100")] = 3
    """Damaged files kept beside the buffer. Salvaged ones go first; one that was not goes with a loss record."""


class TlsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt_listener.tls]`: sensors connect here with TLS 1.2 or 1.3. The files are read again when they change."""

    certificate: Path
    """PEM: the server's certificate, and those that lead to its CA."""
    key: Path
    """PEM: its private key, unencrypted."""
    port: Port = 8883
    client_ca: Path | None = None
    """PEM: with it, every client needs a certificate of this CA, whose common name may stand for user and password,
    and must be one of `users` where there are any."""
    connections_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 1_000
    """A connection with TLS takes much more memory than a plain one; these count against both bounds."""


class ListenerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt_listener]`: sensors connect here; MQTT 3.1.1."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="a TCP port, 1 to 65535, or 0 for TLS alone")] = 1883
    """The plain port; 0 for none, where TLS has one."""
    tls: TlsSettings | None = None
    anonymous: bool = False
    """Whether anybody who reaches the port may write as any device. Without it, `users` says who."""
    users: dict[str, str] = field(default_factory=dict)
    """Device name to the SHA-256 of its secret, in hex. A device writes under its own topics only."""
    devices_file: Path | None = None
    """Where `sluice devices add` keeps the hashes of what it made; `devices.json` beside the buffer without it. Read
    again when it changes."""
    operators: dict[str, str] = field(default_factory=dict)
    """The same for those who may publish to the command topics of every device, and nothing else."""
    command_topics: tuple[str, ...] = ("command/{device}/#",)
    """What a device may subscribe to: templates, with its name for `{device}`."""
    commands_max: Annotated[int, Meta(ge=1, le=1_000, description="commands, 1 to 1000")] = 16
    """Commands with QoS 1 that may wait for one device; beyond it the operator's are not acknowledged."""
    commands_bytes_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 4_000_000
    """What the waiting commands of all devices may take together."""
    sessions_max: Annotated[int, Meta(ge=1, le=100_000, description="sessions, 1 to 100000")] = 10_000
    """Sessions that are kept for clients that connect without clean session; beyond it the one that is without a
    connection for longest makes room."""
    sessions_per_user_max: Annotated[int, Meta(ge=1, le=100_000, description="sessions, 1 to 100000")] = 8
    """The same for one user; anonymous clients have none, and only the bound of all."""
    session_expiry_s: Annotated[float, Meta(gt=0, le=3.2e8, description="seconds, above 0, at most 320000000")] = (
        604_800.0
    )
    """How long a session is kept after its last connection (a week); begins anew when the gateway starts."""
    qos2_unfinished_max: Annotated[int, Meta(ge=1, le=65_535, description="exchanges, 1 to 65535")] = 65_535
    """QoS 2 messages of one session that may wait for their PUBREL: as many as there are packet identifiers."""
    qos2_unfinished_total_max: Annotated[int, Meta(ge=1, le=10_000_000, description="exchanges, 1 to 10000000")] = (
        150_000
    )
    """The same for all sessions together; each takes some 110 bytes. No session may have more than it leaves to the
    others."""
    connections_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 5_000
    connections_per_user_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 8
    """Connections of one user, operators too; anonymous clients have none, and only the bound of all."""
    packet_bytes_max: Annotated[int, Meta(ge=128, le=1_048_576, description="bytes, 128 to 1048576")] = 65_536
    inflight_bytes_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 4_000_000
    """What one connection may have waiting for its commit; beyond it, it is not read from, and is closed while the
    buffer can store nothing. While others send too, it may have an eighth of it."""
    inflight_messages_max: Annotated[int, Meta(ge=1, le=1_000_000, description="messages, 1 to 1000000")] = 10_000
    """The same, counted in messages."""
    inflight_bytes_total_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 8_000_000
    """What all connections together may have waiting; beyond it, none is read from until half of it is stored."""
    connect_timeout_s: Seconds = 10.0
    """How long a connection may take for its TLS handshake, and then for its CONNECT."""
    not_logged_in_per_address_max: Annotated[int, Meta(ge=1, le=100_000, description="connections, 1 to 100000")] = 250
    """Connections of one address (IPv6: its /64) that were heard and have not logged in. The next one closes the
    oldest."""
    new_connections_per_s_max: Annotated[float, Meta(gt=0, le=100_000, description="a number, above 0 to 100000")] = (
        50.0
    )
    """Connections of one address (IPv6: its /64) that are heard each second, and twice as many at once. Those beyond it
    wait up to 5 s for their turn, and those beyond that are closed at once."""
    failed_logins_per_minute_max: Annotated[int, Meta(ge=1, le=10_000, description="log-ins, 1 to 10000")] = 10
    """Wrong log-ins under a name of `users` or `operators` where it logged in last, and as many from everywhere else.
    Beyond it, a right password from there is refused too. Secrets of `sluice devices add` have no such bound."""


Credential = Annotated[str, Meta(max_length=16_383, description="a text of at most 16383 characters")]
"""MQTT carries 65,535 bytes, and a character has up to four (section 1.5.3 of MQTT 3.1.1)."""
ClientId = Annotated[str, Meta(min_length=1, max_length=256, description="a text of 1 to 256 characters")]


class BrokerTlsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[mqtt_brokers.tls]`: the broker is spoken to with TLS 1.2 or 1.3. The files are read at each connection."""

    ca: Path | None = None
    """PEM: who must have signed the broker's certificate; without it, one of the authorities that this box trusts."""
    certificate: Path | None = None
    """PEM: this gateway's certificate, where the broker wants one."""
    key: Path | None = None
    """PEM: its private key, unencrypted."""


class BrokerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[mqtt_brokers]]`: a broker that the site has already, and what is read from it; MQTT 3.1.1."""

    host: str
    topics: tuple[str, ...]
    """Topic filters, such as `device/#`; no shared subscriptions, and none that overlap."""
    port: Port = 1883
    """Where TLS is spoken mostly 8883."""
    qos: Literal[1, 2] = 1
    """The highest QoS that is asked for; each message comes with the lower one of this and its sender's."""
    client_id: ClientId | None = None
    """The session's name at the broker, which must be this gateway's alone; `sluice-` and `gateway.id` without it."""
    user: Credential | None = None
    password_file: Path | None = None
    """A file that holds the password, readable by its owner alone (0400); it is read at each connection."""
    password: Credential | None = None
    tls: BrokerTlsSettings | None = None
    keep_alive_s: Annotated[int, Meta(ge=5, le=3_600, description="seconds, 5 to 3600")] = 30
    packet_bytes_max: Annotated[int, Meta(ge=65_539, le=2**28, description="bytes, 65539 to 268435456")] = 1_048_576
    """Largest message that is taken; a larger one is dropped and counted as lost, for the broker sends it for ever.

    Its topic, which has 65,535 bytes at most, and its packet identifier must be found in it all the same."""
    inflight_bytes_max: Annotated[int, Meta(ge=1_000, le=2**30, description="bytes, 1000 to 1 GiB")] = 4_000_000
    """What may wait for its commit; beyond it the broker is not read from."""
    connect_timeout_s: Seconds = 10.0
    """How long connecting, TLS and CONNACK may each take."""
    backoff_s_min: Seconds = 1.0
    """The longest pause before the first attempt to connect again; it doubles with each that fails."""
    backoff_s_max: Seconds = 30.0
    """The longest pause between two attempts. Each pause is a random share of its longest."""


Baud = Literal[300, 600, 1200, 2400, 4800, 9600, 19200, 38400, 57600, 115200, 230400, 250000, 460800, 921600]
"""Bits a second on a serial line, as adapters and sensors have them."""


Parity = Literal["none", "even", "odd"]
Oscillator = Literal["rc", "ceramic", "crystal"]


class SerialTextSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.text]]`: a sensor that writes its readings as lines of text, and cannot be told that they arrived."""

    port: str
    """One port: its path, or a glob that matches one (`/dev/serial/by-path/...` where adapters have no number)."""
    device: Name
    """Whose readings these are: the line does not say it."""
    format: Literal["key=value", "key:value", "csv", "json", "nmea"]
    """`key=value`, `key:value`: pairs between spaces, commas or semicolons. `csv`: values in the order of `columns`.
    `json`: an object on each line. `nmea`: NMEA 0183 sentences with their checksum."""
    stream: Name = "text"
    baud: Baud = 9600
    data_bits: Literal[7, 8] = 8
    parity: Parity = "none"
    """Many balances leave the factory with 7 data bits and even parity."""
    stop_bits: Literal[1, 2] = 1
    columns: tuple[str, ...] = ()
    """`csv`: a name for each value; an empty one leaves that value out."""
    delimiter: Literal[",", ";", "tab", "space"] = ","
    """`csv`: what stands between values."""
    sentences: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`nmea`: the types that are taken (`MTW`, or `WIMTW` of one talker alone), and names for their fields; an empty
    name leaves that field out. Without any, all are taken; a type without names (`[]`) has its fields named `1`, `2`,
    ..."""
    units: tuple[str, ...] = ()
    """Units that are left out behind a number, in every field: with `["C", "D"]`, `21C` is 21 and `283D` is 283. They
    come beside those that are known without this setting. Not for `json`, whose lines are forwarded as they are."""
    texts: tuple[str, ...] = ()
    """Fields whose value stays a text, whatever it looks like: identities such as `28FF`, `2800` and `007`. Not for
    `json`."""
    line_bytes_max: Annotated[int, Meta(ge=16, le=65_536, description="bytes, 16 to 65536")] = 1_024
    """A longer line is cut off, and counts as one that cannot be read."""


class ModbusRegister(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.modbus.units.registers]]`: one value that a unit has, and how its registers hold it."""

    name: str
    """The member of the payload that it becomes."""
    address: Annotated[int, Meta(ge=0, le=65_535, description="a register's address, 0 to 65535")]
    """As it stands in the request, from 0: what a manual calls 40001 or 30001 is 0."""
    table: Literal["holding", "input", "coil", "discrete"] = "holding"
    type: Literal["u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64", "bit"] = "u16"
    """`bit` with `coil` and `discrete` only. Above 16 bits: several registers, the first one at `address`."""
    word_order: Annotated[
        Literal["ABCD", "CDAB", "BADC", "DCBA", "high-first", "low-first"],
        Meta(
            description='one of "ABCD" (as the standard has it), "CDAB" (registers swapped), "BADC" (the two bytes '
            'of each register swapped), "DCBA" (all bytes reversed)'
        ),
    ] = "ABCD"
    """The order of a number's bytes. A is the most significant of four. `BADC` and `DCBA` swap the bytes of a
    16-bit number, too. `high-first` and `low-first` are older names of `ABCD` and `CDAB`."""
    scale: Annotated[float, Meta(gt=0, le=1e12, description="a number, above 0 and at most 1e12")] = 1.0
    """What the register's number is multiplied by: 0.1 where it counts tenths."""
    offset: float = 0.0
    """What is added after that."""
    null_if: Annotated[
        tuple[int, ...], Meta(description="a list of whole numbers, without quotes, such as [65535] or [0x8000]")
    ] = ()
    """Numbers by which a unit says that it has no value: they become `null`. Each is compared with the register's own
    number, before `scale` and `offset`. Of signed types -32768 and 0x8000 are one number."""


class ModbusUnit(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.modbus.units]]`: one unit on the line."""

    unit: Annotated[int, Meta(ge=1, le=247, description="a unit's address, 1 to 247")]
    device: Name
    registers: tuple[ModbusRegister, ...]
    stream: Name = "modbus"
    interval_s: Annotated[float, Meta(ge=0.05, le=86_400, description="seconds, 0.05 to 86400")] = 10.0
    """How often it is asked."""


class SerialModbusSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[serial.modbus]]`: units of Modbus RTU on one line (RS-485 holds several), asked one after another."""

    port: str
    """One port: its path, or a glob that matches one."""
    units: tuple[ModbusUnit, ...]
    baud: Baud = 9600
    parity: Parity = "even"
    """The standard's default is even, with one stop bit; many devices leave the factory with none."""
    stop_bits: Literal[1, 2] = 1
    timeout_s: Annotated[float, Meta(ge=0.02, le=60, description="seconds, 0.02 to 60")] = 0.5
    """How long a unit's answer is awaited."""
    retries: Annotated[int, Meta(ge=0, le=10, description="times, 0 to 10")] = 1
    """How often it is asked again before it counts as silent until its next turn."""


class SerialSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[serial]`: sensors on serial lines. Ports that `text` or `modbus` name are not of `ports`, whatever matches."""

    ports: tuple[str, ...] = ()
    """Ports of sensors that speak our frames: paths, globs (`/dev/serial/by-id/*`, `/dev/serial/by-path/*`), or "all"
    for every USB adapter; looked at again every `scan_interval_s`, so that ports may come and go."""
    baud: Baud = 38400
    topic: str = "device/{device}/{stream}"
    """The topic that the routes see, made from a sensor's device name and stream name."""
    probe_interval_s: Seconds = 10.0
    oscillator: Oscillator = "rc"
    """What paces the sensors' clocks, at the worst: within 10,000, 5,000 or 100 ppm of true. Bounds of times follow."""
    scan_interval_s: Seconds = 1.0
    text: tuple[SerialTextSettings, ...] = ()
    modbus: tuple[SerialModbusSettings, ...] = ()

    @property
    def names_ports(self) -> bool:
        """Whether any port is named, be it there or not."""
        return bool(self.ports or self.text or self.modbus)


PayloadIdentity = Literal["none", "json", "cbor", "binary"]
TimeSource = Literal["auto", "receipt", "tick", "senml", "timestamp"]


class RouteSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[[routes]]`: which topics go to which Kafka topic, under which key, and what their payload is."""

    topic: str
    """A template: `device/{device}/{stream}`. `+` stands for one level, `#` at the end for any number."""
    kafka: str
    """The Kafka topic's template: `device-{stream}`."""
    content_type: str = "application/json"
    identity: PayloadIdentity = "none"
    """How the payload says who took it: the sensor's `boot` and `seq`, and its `tick` where it has one. `json`: members
    of a JSON object. `cbor`: the same of a CBOR map. `binary`: 17 bytes before the value. See docs/payloads.md."""
    time: TimeSource = "auto"
    """When a reading was taken. `auto`: by the sensor's tick where its identity carries one, else when it came in.
    `tick`: the same, and those without one are counted. `receipt`: when it came in, whatever it says. `senml`: what a
    SenML pack says. `timestamp`: the member `timestamp`, milliseconds since 1970. A serial sensor that sends our
    frames has its tick there."""
    time_error_ms: Annotated[float, Meta(ge=0, le=86_400_000, description="milliseconds, 0 to 86400000")] = 1_000.0
    """`senml`, `timestamp`: how far off a sensor's own time may be, which the installer vouches for."""
    oscillator: Oscillator = "rc"
    """What paces the sensors' ticks, at the worst: as in `[serial]`."""
    least_delay_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 50.0
    """How long the quickest of sixteen readings is under way at the most, from measurement to receipt. Over a mobile or
    satellite network that is more; bounds of times that follow from ticks are as wide as this."""
    device: Name | None = None
    """The device, where the topic names it by what is no name: `topic = "zigbee2mqtt/Living room"`, `device =
    "living-room"`. Such a route counts before those that take the device from the topic."""
    names: Literal["refuse", "escape"] = "refuse"
    """What becomes of a name in the topic that breaks the rule of names. `refuse`: its readings go to the quarantine.
    `escape`: it is written as one that keeps the rule (`x--Wohnzimmer-20-Lampe`), and goes along as it was in a
    header."""
    key: str = "{device}"
    """What a device is called, in Kafka's key and in the tables: `{site}/{device}` keeps equal names of two sites
    apart. Variables of the topic and names, with `/` between them; `gateway.key` may put the namespace in front."""


class KafkaTlsSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka.tls]`: brokers are spoken to with TLS 1.2 or 1.3, and verified. Files are read anew when they change."""

    ca: Path | None = None
    """PEM: who must have signed the brokers' certificates; without it, one of the authorities that this box trusts."""
    certificate: Path | None = None
    """PEM: this gateway's certificate, where the brokers want one."""
    key: Path | None = None
    """PEM: its private key, unencrypted."""


class KafkaSaslSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka.sasl]`: how this gateway logs in."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    """PLAIN sends the password itself: only with `[kafka.tls]`."""
    user: str
    password_file: Path
    """A file whose first line is the password, readable by its owner alone (0400); read again when it changes."""


class KafkaSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[kafka]`: where readings go."""

    bootstrap: tuple[str, ...]
    """`host:port` of one or more brokers, 32 at most; `[address]:port` where it is one of IPv6."""
    tls: KafkaTlsSettings | None = None
    sasl: KafkaSaslSettings | None = None
    create_topics: bool = False
    """Whether the daemon may create a missing topic (with LogAppendTime)."""
    topics_per_device_day_max: Annotated[int, Meta(ge=1, le=10_000, description="topics, 1 to 10000")] = 20
    """Topics that the daemon creates for the readings of one device in a day (UTC); readings of further new topics go
    to the quarantine. Readings of topics that exist are not concerned."""
    topics_created_max: Annotated[int, Meta(ge=1, le=100_000, description="topics, 1 to 100000")] = 1_000
    """Topics that the daemon creates in all; one that was deleted counts no more. Raise it where a route makes a topic
    of each device."""
    partitions: Annotated[int, Meta(ge=1, le=10_000, description="partitions, 1 to 10000")] = 3
    """Partitions of a topic that is created."""
    replicas: Annotated[int, Meta(ge=1, le=32, description="replicas, 1 to 32")] = 3
    """Replicas of a topic that is created; as many as there are brokers where these are fewer."""
    retention_s_min: Annotated[float, Meta(ge=0, le=3.2e8, description="seconds, 0 to 320000000 (ten years)")] = (
        86_400.0
    )
    """A topic that keeps readings for less than this (a day) is not written to: its readers must be able to go away."""
    compression: Literal["zstd", "lz4", "gzip", "snappy", "none"] = "zstd"
    events_topic: str = "gateway-events"
    quarantine_topic: str = "gateway-quarantine"
    record_bytes_max: Annotated[int, Meta(ge=65_536, le=100_000_000, description="bytes, 65536 to 100000000")] = 900_000
    """Largest record that is sent, headers included; a larger one goes to the quarantine. A heartbeat, which names
    every lane that waits, must fit."""
    batch_rows_max: Annotated[int, Meta(ge=100, le=100_000, description="rows, 100 to 100000")] = 5_000
    """Rows of one partition that go in one request; of few, most of each request would be headers."""
    linger_ms: Annotated[float, Meta(ge=0, le=60_000, description="milliseconds, 0 to 60000")] = 50.0
    """How long a live reading waits for company before it is sent; a second at the least where the link is metered. A
    backlog does not wait. A quarter of `live_age_s_max` at most, so that waiting for it makes no reading backlog."""
    drain: Literal["live-first", "oldest-first"] = "live-first"
    """What goes first after an outage. `live-first`: new readings at once, beside the backlog. `oldest-first`: strictly
    in the order in which they came in."""
    backlog_share: Annotated[float, Meta(ge=0.05, le=0.95, description="a share, 0.05 to 0.95")] = 0.5
    """`live-first`: the share of the uplink that the backlog is given while both wait; what one does not need, the
    other has."""
    backlog_topic: str | None = None
    """Where the backlog goes, as a template such as `{topic}.backlog`; without it, to the topic of live readings."""
    live_age_s_max: Annotated[float, Meta(ge=5, le=86_400, description="seconds, 5 to 86400")] = 30.0
    """Live readings that wait longer than this, because the link is slower than they come, become backlog."""
    lane_s_min: Annotated[float, Meta(ge=0, le=3_600, description="seconds, 0 to 3600")] = 10.0
    """A lane is this long at least: an uplink that comes and goes must not begin one each time."""
    lanes_max: Annotated[int, Meta(ge=2, le=1_000, description="lanes, 2 to 1000")] = 64
    """Lanes that hold readings, beyond which none is begun but by a start; the last one goes on."""
    bytes_per_s_max: Annotated[int, Meta(ge=0, le=2**40, description="bytes, 0 to 1 TiB")] = 0
    """What the uplink may take of a metered link, by the second, measured on the wire; 0 is no bound."""
    bytes_per_day_max: Annotated[int, Meta(ge=0, le=2**50, description="bytes, 0 to 1 PiB")] = 0
    """The same by the day (UTC); when it is used up, readings wait on disk until the next day. 0 is no bound."""
    connect_timeout_s: Annotated[float, Meta(ge=0.5, le=120, description="seconds, 0.5 to 120")] = 5.0
    """How long connecting to a broker may take, its TLS handshake included, and then again its log-in; less than
    `request_timeout_s`, within which a session must have begun."""
    request_timeout_s: Annotated[float, Meta(ge=1, le=600, description="seconds, 1 to 600")] = 30.0
    """How long a request may take; its size follows what the link was seen to take in that time."""
    backoff_s_max: Annotated[float, Meta(ge=0.25, le=3_600, description="seconds, 0.25 to 3600")] = 5.0
    """The longest pause between two attempts to reach Kafka."""
    heartbeat_interval_s: Annotated[float, Meta(ge=0.5, le=86_400, description="seconds, 0.5 to 86400")] = 10.0


class StatusPageSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[status_page]`: how the gateway is, for a browser on the LAN, for Prometheus (`/metrics`) and for `/health`.

    Without this section there is none.
    """

    host: str = "0.0.0.0"  # noqa: S104 - the LAN is whom it is for; who asks from elsewhere is refused
    """Whoever asks from an address that is not of a private network is refused, whatever stands here."""
    port: Port = 8080
    password_file: Path = Path("/etc/sluice/credentials/status-page")
    """What `sluice setup` made of the page's password; without that file nobody is let in."""
    connections_max: Annotated[int, Meta(ge=1, le=1_000, description="connections, 1 to 1000")] = 32
    """Of this box itself and of addresses where somebody has logged in, and as many of all others."""
    history_devices_max: Annotated[int, Meta(ge=1, le=10_000, description="devices, 1 to 10000")] = 200
    """Devices whose last hour is kept in memory; of more, those give way that nobody looks at."""


class LogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`[log]`: what the daemon says of itself on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


DEFAULT_ROUTE = RouteSettings(topic="device/{device}/{stream}", kafka="device-{stream}")
NO_SOURCE = (
    "nothing comes in: no section says where from; write [mqtt_listener] for sensors that connect to this box, "
    "[[mqtt_brokers]] for a broker of the site, or [serial] with ports"
)
"""Said by `sluice check`, `sluice run` and `sluice status` alike, where not `Settings.has_source`."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `gateway.toml`. A source whose section is missing is not started."""

    gateway: GatewaySettings
    kafka: KafkaSettings
    buffer: BufferSettings = BufferSettings()
    mqtt_listener: ListenerSettings | None = None
    mqtt_brokers: tuple[BrokerSettings, ...] = ()
    serial: SerialSettings | None = None
    routes: tuple[RouteSettings, ...] = (DEFAULT_ROUTE,)
    fallback_topic: str | None = None
    """Kafka topic for MQTT topics that no route matches; without it they go to the quarantine."""
    status_page: StatusPageSettings | None = None
    log: LogSettings = LogSettings()

    @property
    def has_source(self) -> bool:
        """Whether anything says where readings come from, be it there or not."""
        on_serial = self.serial is not None and self.serial.names_ports
        return on_serial or self.mqtt_listener is not None or bool(self.mqtt_brokers)
