"""Drives paho's MQTT client by the asyncio loop: reads 16 KB at a time, writes many acknowledgements as one packet.

paho takes several system calls to read a packet, answers QoS 2 before anything is on disk, and hides some refusals. So
this module reads and cuts packets itself, and gives all of them to `packets_came`. paho makes CONNECT, SUBSCRIBE,
UNSUBSCRIBE and DISCONNECT, and owns the queue of packets to write. This module uses or overrides paho's private
`_sock`, `_create_socket`, `_packet_queue` and `_sock_close`. So pyproject.toml pins paho's version, and a test fails if
one of them changes.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final

import structlog
from paho.mqtt.client import Client, DisconnectFlags
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from gateway.mqtt.packet_reader import Packet, PacketReader
from gateway.mqtt.protocol import MalformedPacketError
from gateway.mqtt.protocol5 import NEVER_EXPIRES

READ_BYTES: Final = 16_384
"""Bytes that one read may bring: the most that a TLS record holds. More would keep others waiting."""
_PINGREQ: Final = b"\xc0\x00"
_PUBACK: Final = 0x40
"""Packet type for queueing acknowledgements: paho tells only PUBLISH and DISCONNECT from the rest."""
CLOSED: Final = (
    "the broker or the network closed it; if this happens again and again, another client may use the same client_id: "
    "give this gateway its own"
)

_log = structlog.get_logger("sluice.mqtt_broker")


class BrokerClient(Client):
    """One connection to a broker, on a socket that is connected already.

    `packets_came` is called with the packets of each read; if it raises, the connection ends. `ended` gets the reason,
    in words, when the connection is over.
    """

    def __init__(
        self,
        link: socket.socket,
        client_id: str,
        packet_bytes_max: int,
        packets_came: Callable[[list[Packet]], None],
        protocol: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311,
    ) -> None:
        is_of_5 = protocol is MQTTProtocolVersion.MQTTv5
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            # MQTT 5 has Clean Start instead, which `open` sets.
            clean_session=None if is_of_5 else False,
            protocol=protocol,
        )
        self._is_of_5 = is_of_5
        self._loop_of = asyncio.get_running_loop()
        self._link: socket.socket = link
        self._reader = PacketReader(packet_bytes_max)
        self._packets_came = packets_came
        self._is_read_from = False
        self.connack: asyncio.Future[int] = self._loop_of.create_future()
        """CONNACK's return code (section 3.2.2.3), for `packets_came` to set."""
        self.ended: asyncio.Future[str] = self._loop_of.create_future()
        self.heard_s = self.wrote_s = self.pinged_s = self._loop_of.time()
        """The loop's times when bytes last came, when bytes were last written, and when a PINGREQ last was."""
        self.on_disconnect = self._told_end
        self.on_socket_register_write = self._wants_to_write
        self.on_socket_unregister_write = self._has_written
        self.on_socket_close = self._is_closing

    def open(self, host: str, port: int, keep_alive_s: int) -> None:
        """Send CONNECT and begin to read."""
        if self._is_of_5:
            kept = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            kept.SessionExpiryInterval = NEVER_EXPIRES
            self.connect_async(host, port, keep_alive_s, clean_start=False, properties=kept)
        else:
            self.connect_async(host, port, keep_alive_s)
        self.reconnect()
        self.resume_reading()
        self.loop_write()

    @property
    def is_read_from(self) -> bool:
        """Whether the socket is read."""
        return self._is_read_from

    def pause_reading(self) -> None:
        """Stop reading the socket, which slows the broker down. Packets are still written."""
        if self._is_read_from:
            self._is_read_from = False
            self._loop_of.remove_reader(self._link)

    def resume_reading(self) -> None:
        """Read the socket again."""
        if not self._is_read_from and self._sock is not None:
            self._is_read_from = True
            self.heard_s = self._loop_of.time()
            self._loop_of.add_reader(self._link, self._read)

    def send(self, packets: bytes, *, ping: bool = False) -> None:
        """Write packets that are made already, and with `ping` a PINGREQ after them."""
        if self._sock is None:
            return
        self.wrote_s = self._loop_of.time()
        if ping:
            packets += _PINGREQ
            self.pinged_s = self.wrote_s
        self._packet_queue(_PUBACK, packets, 0, 0)
        self.loop_write()

    def end(self, cause: str) -> None:
        """End the connection at once, without DISCONNECT."""
        if not self.ended.done():
            self.ended.set_result(cause)
        self._sock_close()
        self._link.close()

    def _read(self) -> None:
        """Read once. This replaces paho's `loop_read`, which asks the socket for every byte."""
        try:
            # With TLS, this is one whole record. Decrypted bytes left behind would not wake the selector.
            data = self._link.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            data = b""
        if not data:
            self.end(CLOSED)
            return
        self.heard_s = self._loop_of.time()
        try:
            self._packets_came(self._reader.receive(data))
        except MalformedPacketError as error:
            self.end(
                f"it sent something that is not MQTT {'5' if self._is_of_5 else '3.1.1'} ({error}); check that port is "
                "the broker's port for MQTT, "
                "without TLS if there is no [mqtt_brokers.tls]"
            )
        except Exception:  # noqa: BLE001 - whatever it is, packets that were read and not taken must come again
            _log.exception("the broker's packets could not be taken, which is a fault of this gateway: report it")
            self.end("this gateway failed to take its packets; it will send them again")

    def _create_socket(self) -> socket.socket:
        return self._link

    def _told_end(
        self, _client: Client, _data: object, _flags: DisconnectFlags, _code: ReasonCode, _properties: Properties | None
    ) -> None:
        if not self.ended.done():
            self.ended.set_result(CLOSED)

    def _wants_to_write(self, _client: Client, _data: object, _link: object) -> None:
        self._loop_of.add_writer(self._link, self.loop_write)

    def _has_written(self, _client: Client, _data: object, _link: object) -> None:
        self._loop_of.remove_writer(self._link)

    def _is_closing(self, _client: Client, _data: object, _link: object) -> None:
        self.pause_reading()
