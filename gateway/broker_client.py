"""paho's MQTT client driven by the asyncio loop: reads 64 KB at a time, writes many acknowledgements as one packet.

paho takes several system calls to read a packet, and answers QoS 2 before anything is on disk. So what a read brings is
cut into packets here, and all that carries readings goes to `packets_came`; paho makes CONNECT, SUBSCRIBE and
DISCONNECT, reads what answers them (`answer`), and owns the queue of what is to be written. What is used or overridden
of its private parts is `_sock`, `_create_socket`, `_in_packet`, `_packet_handle`, `_packet_queue`, `_loop_rc_handle`:
hence the pinned version in pyproject.toml, and a test that fails where one of them changes.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from gateway.mqtt_packet_reader import MalformedPacketError, Packet, PacketReader

READ_BYTES: Final = 65_536
LINK_TIMEOUT_S: Final = 10
"""How long a broker may leave bytes of ours unconfirmed, or TCP's own probes unanswered."""
PROBE_AFTER_S: Final = 5
"""Silence after which TCP probes, and between its probes."""
_PINGREQ: Final = b"\xc0\x00"
_PUBACK: Final = 0x40
"""What a packet of acknowledgements is queued as: paho tells only PUBLISH and DISCONNECT from the rest."""


async def connect(host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
    """Connect, with TLS where there is a context. Raises OSError, of which ssl.SSLError is a kind."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        link = socket.socket(family, kind, protocol)
        try:
            link.setblocking(False)
            _notice_a_dead_link(link)
            await loop.sock_connect(link, address)
        except OSError as error:
            link.close()
            failure = error
        except BaseException:
            link.close()
            raise
        else:
            return link if context is None else await _encrypted(link, context, host)
    raise failure


def _notice_a_dead_link(link: socket.socket) -> None:
    """Have TCP end the connection within seconds of a black hole or a change of this box's address."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LINK_TIMEOUT_S * 1000)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_AFTER_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LINK_TIMEOUT_S // PROBE_AFTER_S)


async def _encrypted(link: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    loop = asyncio.get_running_loop()
    encrypted = context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
    try:
        while True:
            ready: asyncio.Future[None] = loop.create_future()
            try:
                encrypted.do_handshake()
            except ssl.SSLWantReadError:
                loop.add_reader(encrypted, _resolve, ready)
            except ssl.SSLWantWriteError:
                loop.add_writer(encrypted, _resolve, ready)
            except ConnectionError as error:
                raise ssl.SSLError(f"the other side ended the handshake ({error.strerror})") from error
            else:
                return encrypted
            try:
                await ready
            finally:
                loop.remove_reader(encrypted)
                loop.remove_writer(encrypted)
    except BaseException:
        encrypted.close()
        raise


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class BrokerClient(Client):
    """One connection to a broker, on a socket that is connected already; made anew for each.

    `packets_came` is called with what one read brought. `ended` gets its result when the connection is over.
    """

    def __init__(
        self, link: socket.socket, client_id: str, packet_bytes_max: int, packets_came: Callable[[list[Packet]], None]
    ) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=False,
            protocol=MQTTProtocolVersion.MQTTv311,
            # On a CONNACK that it does not like paho would connect anew by itself, and wait for it.
            reconnect_on_failure=False,
            manual_ack=True,
        )
        self._loop_of = asyncio.get_running_loop()
        self._link: socket.socket = link
        self._reader = PacketReader(packet_bytes_max)
        self._packets_came = packets_came
        self._reading = False
        self.ended: asyncio.Future[MQTTErrorCode | ReasonCode] = self._loop_of.create_future()
        self.accepted: Callable[[ReasonCode, bool], None] = lambda _code, _session_present: None
        """Called for CONNACK, with its return code and whether the broker has the session (section 3.2.2)."""
        self.granted: Callable[[int, Sequence[ReasonCode]], None] = lambda _identifier, _codes: None
        """Called for each SUBACK with its packet identifier and a code for each filter (section 3.9)."""
        self.ungranted: Callable[[int], None] = lambda _identifier: None
        """Called for each UNSUBACK with its packet identifier (section 3.11)."""
        self.heard_s = self.wrote_s = self._loop_of.time()
        """When something came last, and when something was last given to be written, on the loop's clock."""
        self.on_connect = self._told_connack
        self.on_subscribe = self._told_suback
        self.on_unsubscribe = self._told_unsuback
        self.on_disconnect = self._told_end
        self.on_socket_register_write = self._wants_to_write
        self.on_socket_unregister_write = self._has_written
        self.on_socket_close = self._is_closing

    def open(self, host: str, port: int, keep_alive_s: int) -> None:
        """Send CONNECT and begin to read."""
        self.connect_async(host, port, keep_alive_s)
        self.reconnect()
        self.resume_reading()
        self.loop_write()

    @property
    def is_reading(self) -> bool:
        """Whether what the broker sends is taken from the socket."""
        return self._reading

    def pause_reading(self) -> None:
        """Leave what comes in the socket, which slows the broker down; what is written goes out all the same."""
        if self._reading:
            self._reading = False
            self._loop_of.remove_reader(self._link)

    def resume_reading(self) -> None:
        """Take what comes again."""
        if not self._reading and self._sock is not None:
            self._reading = True
            self.heard_s = self._loop_of.time()
            self._loop_of.add_reader(self._link, self.loop_read)

    def send(self, packets: bytes, *, ping: bool = False) -> None:
        """Write packets that are made already, and a PINGREQ behind them."""
        if self._sock is None:
            return
        if ping:
            packets += _PINGREQ
        self.wrote_s = self._loop_of.time()
        self._packet_queue(_PUBACK, packets, 0, 0)
        self.loop_write()

    def answer(self, packet: Packet) -> None:
        """Let paho have a packet: CONNACK, SUBACK, UNSUBACK; anything else ends the connection."""
        incoming = self._in_packet
        incoming["command"] = packet.first
        incoming["remaining_length"] = len(packet.body)
        incoming["packet"] = bytearray(packet.body)
        incoming["pos"] = 0
        code = self._packet_handle()
        if code:
            self._loop_rc_handle(code)

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Take what is there to be read. Instead of paho's own, which asks the socket for every byte."""
        del max_packets
        try:
            data = self._receive()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        except OSError:
            data = b""
        if not data:
            return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
        self.heard_s = self._loop_of.time()
        try:
            self._packets_came(self._reader.receive(data))
        except (MalformedPacketError, UnicodeDecodeError):
            return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_PROTOCOL)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def cut(self) -> None:
        """End the connection at once, without DISCONNECT."""
        if self._sock is not None:
            self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_CONN_LOST)
        elif not self.ended.done():
            self._link.close()
            self.ended.set_result(MQTTErrorCode.MQTT_ERR_CONN_LOST)

    def _receive(self) -> bytes:
        link = self._link
        data = link.recv(READ_BYTES)
        if isinstance(link, ssl.SSLSocket):
            # TLS hands out a record at a time, 16 KB at most; what is decrypted already wakes no selector.
            while (waiting := link.pending()) and len(data) < READ_BYTES:
                data += link.recv(waiting)
            if link.pending():
                self._loop_of.call_soon(self._read_on)
        return data

    def _read_on(self) -> None:
        if self._reading:
            self.loop_read()

    def _create_socket(self) -> socket.socket:
        return self._link

    def _told_connack(
        self, _client: Client, _data: object, flags: ConnectFlags, code: ReasonCode, _properties: Properties | None
    ) -> None:
        self.accepted(code, flags.session_present)

    def _told_suback(
        self, _client: Client, _data: object, identifier: int, codes: list[ReasonCode], _properties: Properties | None
    ) -> None:
        self.granted(identifier, codes)

    def _told_unsuback(
        self, _client: Client, _data: object, identifier: int, _codes: list[ReasonCode], _properties: Properties | None
    ) -> None:
        self.ungranted(identifier)

    def _told_end(
        self, _client: Client, _data: object, _flags: DisconnectFlags, code: ReasonCode, _properties: Properties | None
    ) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def _wants_to_write(self, _client: Client, _data: object, _link: object) -> None:
        self._loop_of.add_writer(self._link, self.loop_write)

    def _has_written(self, _client: Client, _data: object, _link: object) -> None:
        self._loop_of.remove_writer(self._link)

    def _is_closing(self, _client: Client, _data: object, _link: object) -> None:
        self.pause_reading()
