/* The MQTT link's side of the fuzzer: a modem and a server that answer what they understand, over a line that damages,
 * and words and packets that come unasked. */
#include <stdio.h>
#include <string.h>

#include "crc32.h"
#include "fuzz.h"
#include "host_board.h"
#include "modem.h"
#include "mqtt_packets.h"

enum { ANSWER_BYTES_MAX = 60, PACKET_BYTES_MAX = 512 };

static struct {
	bool heard; /* anything yet */
	bool transparent;
	uint32_t sent_at_ms;
	uint8_t answer[ANSWER_BYTES_MAX];
	uint16_t answer_length;
	uint8_t packet[PACKET_BYTES_MAX];
	uint16_t length;
} peer;

void fuzz_prepare(void)
{
	memset(&peer, 0, sizeof peer);
	memset(host_eeprom, 0xFF, sizeof host_eeprom);
	struct network network;
	memset(&network, 0, sizeof network);
	network.version = NETWORK_VERSION;
	network.port = 1883;
	/* The longest texts, all of characters that have to be escaped, or none at all. */
	memset(network.host, 'h', sizeof network.host - 1);
	memset(network.ssid, fuzz_below(2) ? '"' : 0, sizeof network.ssid - 1);
	memset(network.passphrase, fuzz_below(2) ? '\\' : 0, sizeof network.passphrase - 1);
	memset(network.secret, fuzz_below(2) ? 's' : 0, sizeof network.secret - 1);
	network.crc = crc32((const uint8_t *)&network, sizeof network - sizeof network.crc);
	memcpy(host_eeprom + EEPROM_NETWORK, &network, sizeof network);
	struct configuration configuration = {.version = CONFIGURATION_VERSION, .device_length = DEVICE_BYTES_MAX};
	memset(configuration.device, 'd', sizeof configuration.device);
	configuration.crc = crc32((const uint8_t *)&configuration, sizeof configuration - sizeof configuration.crc);
	memcpy(host_eeprom + EEPROM_CONFIGURATION, &configuration, sizeof configuration);
}

static void answer(const void *bytes, size_t length)
{
	if (peer.answer_length + length > sizeof peer.answer)
		return;
	memcpy(peer.answer + peer.answer_length, bytes, length);
	peer.answer_length += (uint16_t)length;
}

static void say_unasked(void)
{
	static const char *const words[] = {
		"OK\r\n", "ERROR\r\n", "FAIL\r\n", "busy p...\r\n", "busy s...\r\n", "ready\r\n",
		"WIFI DISCONNECT\r\n", "CLOSED\r\n", ">", "\r\n>", "WIFI GOT IP\r\n", "ALREADY CONNECTED\r\n",
		"+CWJAP:1\r\n",
		"a line that is longer than all that a modem has to say\r\n", "\n", "",
	};
	static const uint8_t packets[][5] = {
		{0x20, 2, 0, 0}, {0x20, 2, 1, 0}, {0x20, 2, 0, 3}, {0x20, 2, 0, 5}, {0x40, 2, 0x40, 1},
		{0xD0, 0}, {0x30, 0xFF, 0xFF, 0xFF, 0x7F}, {0x30, 0xFF, 0xFF, 0xFF, 0xFF}, {0x40, 3},
		{0xF0, 0}, {0x90, 3, 0, 1, 0},
	};
	const uint8_t id = (uint8_t)fuzz_below(256);
	const uint8_t command[] = {0x32, 10, 0, 1, 'c', 0, id, 'l', 'e', 'd', '=', '0' + (id & 3)};
	if (fuzz_below(3) == 0) {
		answer(command, sizeof command);
	} else if (fuzz_below(2)) {
		const char *word = words[fuzz_below(sizeof words / sizeof words[0])];
		answer(word, strlen(word));
	} else {
		const uint8_t *packet = packets[fuzz_below(sizeof packets / sizeof packets[0])];
		answer(packet, packet[1] < 4 ? 2 + packet[1] : 5);
	}
	if (fuzz_below(100) == 0)
		peer.transparent = !peer.transparent;
}

void fuzz_feed(uint32_t now_ms, uint32_t odds)
{
	(void)now_ms;
	if (odds < 1000 && fuzz_below(200) == 0)
		say_unasked();
	/* In two pieces, as often as not. */
	uint16_t length = peer.answer_length;
	if (length && fuzz_below(2))
		length = (uint16_t)fuzz_below(length + 1u);
	uint8_t damaged[2 * ANSWER_BYTES_MAX];
	fuzz_receive(damaged, fuzz_damage(damaged, peer.answer, length, odds));
	peer.answer_length -= length;
	memmove(peer.answer, peer.answer + length, peer.answer_length);
}

static void take_command(void)
{
	bool ends = peer.length >= 2 && memcmp(peer.packet + peer.length - 2, "\r\n", 2) == 0;
	fuzz_check(ends, "a command ends with CR LF");
	if (fuzz_below(20) == 0)
		return;
	bool dialled = peer.length >= 10 && memcmp(peer.packet, "AT+CIPSEND", 10) == 0;
	if (peer.length >= 6 && memcmp(peer.packet, "AT+RST", 6) == 0)
		answer("OK\r\nready\r\n", 11);
	else
		answer("OK\r\n", 4);
	if (dialled) {
		answer("\r\n>", 3);
		peer.transparent = true;
	}
}

/* One whole packet that begins at `at`; gives how long it is. */
static uint16_t take_packet(const uint8_t *at, uint16_t left)
{
	uint16_t length = left >= 3 && at[1] & 0x80 ? 3 + (at[1] & 0x7F) + (at[2] << 7) : 2 + at[1];
	fuzz_check(left >= 2 && length <= left, "a packet is as long as it says");
	switch (at[0] & 0xF0) {
	case 0x10:
		answer("\x20\x02\0\0", 4);
		break;
	case 0x30: {
		const uint8_t *id = at + (at[1] & 0x80 ? 3 : 2);
		id += 2 + id[1];
		fuzz_check(id[0] || id[1], "no packet identifier is 0");
		const uint8_t puback[] = {0x40, 2, id[0], id[1]};
		answer(puback, sizeof puback);
		break;
	}
	case 0xC0:
		answer("\xD0\0", 2);
		break;
	case 0x80: {
		const uint8_t suback[] = {0x90, 3, at[2], at[3], 1};
		answer(suback, sizeof suback);
		break;
	}
	case 0x40:
		break;
	default:
		fuzz_check(0, "a client sends CONNECT, PUBLISH, PUBACK, SUBSCRIBE and PINGREQ");
	}
	return length;
}

void fuzz_take(const uint8_t *bytes, uint16_t length, uint32_t now_ms)
{
	fuzz_check(length <= PACKET_BYTES_MAX, "one thing is sent at a time");
	memcpy(peer.packet, bytes, length);
	peer.length = length;
	if (length == 3 && memcmp(bytes, "+++", 3) == 0) {
		fuzz_check(!peer.heard || now_ms - peer.sent_at_ms >= 20, "the escape has silence before it");
		peer.transparent = false;
		peer.answer_length = 0;
	} else if (modem_connected()) {
		/* The modem may know better; then it hears an end of line at most. */
		for (uint16_t at = 0; at < length;)
			at += take_packet(bytes + at, length - at);
	} else {
		take_command();
	}
	peer.heard = true;
	peer.sent_at_ms = now_ms;
}
