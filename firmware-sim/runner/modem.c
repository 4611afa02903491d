#include "modem.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "chip.h"
#include "fault_log.h"
#include "line.h"
#include "system.h"
#include "uart_bits.h"

enum {
	BAUD = 38400,
	BOOT_ROM_BAUD = 74880, /* at which an ESP8266's boot ROM speaks, whatever is set */
	COMMAND_BYTES_MAX = 256,
	HOST_BYTES_MAX = 128,
	SEND_BUFFER_BYTES = 2048, /* of transparent transmission; more than that is lost */

	BOOT_US = 300000,
	JOIN_US = 500000,
	REJOIN_US = 1000000,
	DIAL_US_MAX = 10000000,
	REDIAL_US = 1000000,
	/* Silence on both sides of +++, and how long after it no command is heard. */
	ESCAPE_SILENCE_US = 20000,
	ESCAPE_DEAF_US = 1000000,
	ESCAPE_BYTES = 3,

	/* Connections that broke without a farewell stay open on this machine, for the peer must not notice. */
	FORSAKEN_MAX = 16,
	CONNACK_BYTES = 4,
};

enum tcp { TCP_CLOSED, TCP_DIALLING, TCP_OPEN };

static struct {
	bool off;
	bool echo;
	bool transparent_mode; /* what AT+CIPMODE set */
	bool transparent;      /* bytes go through */

	bool in_reach, knows_network, has_address;
	uint64_t joins_at_us;   /* by itself, 0: not */
	uint64_t booted_at_us;  /* 0: it has */
	uint64_t command_at_us; /* when the join that a command asked for is decided; 0: none was */
	bool command_dials;     /* a command waits for the connection */

	char command[COMMAND_BYTES_MAX];
	size_t command_length;

	enum tcp tcp;
	int fd;
	char host[HOST_BYTES_MAX];
	unsigned port, keep_alive_s;
	uint64_t dial_ends_us, redial_at_us;
	uint8_t answer[CONNACK_BYTES]; /* how the connection's bytes from the gateway begin */
	size_t answered;
	bool let_in;
	int forsaken[FORSAKEN_MAX];
	unsigned forsaken_count;

	uint8_t to_send[SEND_BUFFER_BYTES];
	size_t to_send_count;
	unsigned plus_count; /* held back: they may be the escape */
	uint64_t last_byte_us;
	uint64_t deaf_until_us;
} modem;

static void say(const char *text)
{
	line_to_chip((const uint8_t *)text, strlen(text), 0);
}

/* Said without being asked: not while bytes go through. */
static void tell(const char *text)
{
	if (!modem.transparent)
		say(text);
}

/* --- TCP ----------------------------------------------------------------------------------------------------------- */

/* Whoever runs the board wants to know why nothing arrives. What JSON would need an escape for is in no host's name. */
static void note(const char *what)
{
	char words[HOST_BYTES_MAX + 64];
	snprintf(words, sizeof words, "%s:%u: %s", modem.host, modem.port, what);
	for (char *at = words; *at; at++)
		if (*at < ' ' || *at > '~' || *at == '"' || *at == '\\')
			*at = '?';
	fault_log_link(words);
}

/* The gateway's first packet is CONNACK (MQTT 3.1.1, 3.2): 0x20, 2, flags, return code. */
static void note_answer(const uint8_t *bytes, size_t count)
{
	static const char *const refusals[] = {
		"it does not speak MQTT 3.1.1",
		"it rejects the client identifier",
		"it takes no readings at present, or has too many connections",
		"wrong user name or password",
		"it wants a user name and password",
	};
	if (modem.answered == CONNACK_BYTES)
		return;
	while (count-- && modem.answered < CONNACK_BYTES)
		modem.answer[modem.answered++] = *bytes++;
	if (modem.answered < CONNACK_BYTES)
		return;
	uint8_t code = modem.answer[3];
	if (modem.answer[0] != 0x20 || modem.answer[1] != 2) {
		note("it answers with something else than MQTT");
	} else if (code == 0) {
		modem.let_in = true;
		fault_log_link("let in");
	} else {
		note(code <= sizeof refusals / sizeof *refusals ? refusals[code - 1] : "it refuses");
	}
}

/* A refusal stays the last word: it says more than the end that follows it. */
static void note_end(void)
{
	if (modem.let_in)
		note("the connection ended");
	else if (modem.tcp == TCP_OPEN && modem.answered < CONNACK_BYTES)
		note("the connection ended without an answer to CONNECT");
	modem.let_in = false;
}

static void hang_up(void)
{
	note_end();
	if (modem.tcp != TCP_CLOSED)
		close(modem.fd);
	modem.tcp = TCP_CLOSED;
	modem.to_send_count = 0;
}

/* The radio is gone: no FIN, no RST; the peer finds out by its own time-outs. */
static void forsake(void)
{
	if (modem.tcp == TCP_OPEN) {
		int *place = &modem.forsaken[modem.forsaken_count++ % FORSAKEN_MAX];
		if (modem.forsaken_count > FORSAKEN_MAX)
			close(*place);
		*place = modem.fd;
		modem.tcp = TCP_CLOSED;
		modem.to_send_count = 0;
	}
	hang_up();
}

/* A name that is no address is looked up at once: meanwhile the board stands still. */
static bool dial(void)
{
	char service[16];
	snprintf(service, sizeof service, "%u", modem.port);
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
	int error = getaddrinfo(modem.host, service, &hints, &found);
	if (error != 0) {
		note(gai_strerror(error));
		return false;
	}
	modem.fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	bool begun = modem.fd >= 0 && (connect(modem.fd, found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
	freeaddrinfo(found);
	if (!begun) {
		note(strerror(errno));
		if (modem.fd >= 0)
			close(modem.fd);
		return false;
	}
	int on = 1;
	setsockopt(modem.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	if (modem.keep_alive_s) {
		int idle_s = (int)modem.keep_alive_s;
		setsockopt(modem.fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
		setsockopt(modem.fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
	}
	modem.tcp = TCP_DIALLING;
	modem.dial_ends_us = chip_us() + DIAL_US_MAX;
	return true;
}

static void dial_failed(void)
{
	hang_up();
	modem.redial_at_us = chip_us() + REDIAL_US;
	if (modem.command_dials)
		say("CLOSED\r\n\r\nERROR\r\n");
	modem.command_dials = false;
}

static void check_dialling(void)
{
	struct pollfd line = {.fd = modem.fd, .events = POLLOUT};
	if (poll(&line, 1, 0) == 0) {
		if (chip_us() >= modem.dial_ends_us) {
			note("no answer");
			dial_failed();
		}
		return;
	}
	int error = 0;
	socklen_t length = sizeof error;
	if (getsockopt(modem.fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error) {
		note(strerror(error));
		dial_failed();
		return;
	}
	modem.tcp = TCP_OPEN;
	modem.answered = 0;
	if (modem.command_dials)
		say("CONNECT\r\n\r\nOK\r\n");
	modem.command_dials = false;
}

static void connection_broke(void)
{
	hang_up();
	modem.redial_at_us = chip_us() + REDIAL_US;
	tell("CLOSED\r\n");
}

static bool send_to_network(void)
{
	if (modem.to_send_count == 0)
		return false;
	ssize_t sent = send(modem.fd, modem.to_send, modem.to_send_count, MSG_NOSIGNAL);
	if (sent < 0) {
		if (errno != EAGAIN && errno != EINTR)
			connection_broke();
		return false;
	}
	modem.to_send_count -= (size_t)sent;
	memmove(modem.to_send, modem.to_send + sent, modem.to_send_count);
	return true;
}

static bool receive_from_network(void)
{
	uint8_t bytes[1024];
	char header[32] = "";
	/* The header of what comes while no bytes go through needs room as well. */
	size_t room = line_room() < sizeof bytes + sizeof header ? 0 : sizeof bytes;
	ssize_t got = room ? recv(modem.fd, bytes, room, 0) : -1;
	if (!room || (got < 0 && (errno == EAGAIN || errno == EINTR)))
		return false;
	if (got <= 0) {
		connection_broke();
		return false;
	}
	note_answer(bytes, (size_t)got);
	if (!modem.transparent) {
		snprintf(header, sizeof header, "\r\n+IPD,%zd:", got);
		say(header);
	}
	line_to_chip(bytes, (size_t)got, boottime_us());
	return true;
}

/* --- Commands ------------------------------------------------------------------------------------------------------ */

/* Take a quoted text with ESP-AT's backslashes off the front; null where there is none, or none so short. */
static const char *take_text(const char *at, char *to, size_t room)
{
	size_t length = 0;
	if (*at++ != '"')
		return NULL;
	for (; *at && *at != '"'; at++) {
		if (*at == '\\' && at[1])
			at++;
		if (length + 1 >= room)
			return NULL;
		to[length++] = *at;
	}
	to[length] = 0;
	return *at == '"' ? at + 1 : NULL;
}

static void command_join(const char *arguments)
{
	char name[33], passphrase[65];
	const char *at = take_text(arguments, name, sizeof name);
	at = at && *at == ',' ? take_text(at + 1, passphrase, sizeof passphrase) : NULL;
	if (!at || *at || !*name) {
		say("\r\nERROR\r\n");
		return;
	}
	if (modem.has_address)
		say("WIFI DISCONNECT\r\n");
	modem.has_address = false;
	modem.knows_network = true;
	modem.joins_at_us = 0;
	modem.command_at_us = chip_us() + JOIN_US;
}

static void command_dial(const char *arguments)
{
	char kind[8], host[HOST_BYTES_MAX];
	unsigned port, keep_alive_s = 0;
	int length = 0;
	const char *at = take_text(arguments, kind, sizeof kind);
	at = at && *at == ',' ? take_text(at + 1, host, sizeof host) : NULL;
	bool numbers = at && sscanf(at, ",%5u%n", &port, &length) == 1 && port >= 1 && port <= 65535;
	if (numbers && at[length]) {
		at += length;
		numbers = sscanf(at, ",%4u%n", &keep_alive_s, &length) == 1 && !at[length] && keep_alive_s <= 7200;
	}
	if (!numbers || strcmp(kind, "TCP") != 0) {
		say("\r\nERROR\r\n");
	} else if (modem.tcp != TCP_CLOSED) {
		say("ALREADY CONNECTED\r\n\r\nERROR\r\n");
	} else if (!modem.has_address) {
		say("no ip\r\n\r\nERROR\r\n");
	} else {
		strcpy(modem.host, host);
		modem.port = port;
		modem.keep_alive_s = keep_alive_s;
		modem.command_dials = true;
		if (!dial())
			dial_failed();
	}
}

static void command_send(void)
{
	if (!modem.transparent_mode || modem.tcp != TCP_OPEN) {
		say("link is not valid\r\n\r\nERROR\r\n");
		return;
	}
	say("\r\nOK\r\n\r\n>");
	modem.transparent = true;
	modem.plus_count = 0;
	modem.last_byte_us = chip_us();
}

static void command_close(void)
{
	if (modem.tcp == TCP_CLOSED) {
		say("\r\nERROR\r\n");
		return;
	}
	hang_up();
	say("CLOSED\r\n\r\nOK\r\n");
}

static void obey(const char *command)
{
	static const char join[] = "AT+CWJAP=", start[] = "AT+CIPSTART=";
	if (modem.command_at_us || modem.command_dials) {
		say("\r\nbusy p...\r\n");
	} else if (strncmp(command, join, sizeof join - 1) == 0) {
		command_join(command + sizeof join - 1);
	} else if (strncmp(command, start, sizeof start - 1) == 0) {
		command_dial(command + sizeof start - 1);
	} else if (strcmp(command, "AT+CIPSEND") == 0) {
		command_send();
	} else if (strcmp(command, "AT+CIPCLOSE") == 0) {
		command_close();
	} else if (strcmp(command, "AT+RST") == 0) {
		say("\r\nOK\r\n");
		modem_restart();
	} else if (strcmp(command, "AT") == 0 || strcmp(command, "AT+CWMODE=1") == 0) {
		say("\r\nOK\r\n");
	} else if (strcmp(command, "ATE0") == 0 || strcmp(command, "ATE1") == 0) {
		modem.echo = command[3] == '1';
		say("\r\nOK\r\n");
	} else if (strcmp(command, "AT+CIPMODE=0") == 0 || strcmp(command, "AT+CIPMODE=1") == 0) {
		modem.transparent_mode = command[11] == '1';
		say("\r\nOK\r\n");
	} else {
		say("\r\nERROR\r\n");
	}
}

static void take_command_byte(uint8_t byte)
{
	if (modem.echo)
		line_to_chip(&byte, 1, 0);
	if (byte != '\n') {
		/* A line that is too long keeps its end's \r; no command is so long. */
		if (modem.command_length == sizeof modem.command - 1)
			modem.command_length--;
		modem.command[modem.command_length++] = (char)byte;
		return;
	}
	bool ends_well = modem.command_length && modem.command[modem.command_length - 1] == '\r';
	modem.command[modem.command_length - ends_well] = 0;
	modem.command_length = 0;
	if (ends_well && *modem.command)
		obey(modem.command);
}

/* --- Transparent transmission -------------------------------------------------------------------------------------- */

static void let_through(uint8_t byte)
{
	/* While the connection is down, what the chip sends is lost: it cannot know. */
	if (modem.tcp == TCP_OPEN && modem.to_send_count < sizeof modem.to_send)
		modem.to_send[modem.to_send_count++] = byte;
}

static void let_held_through(void)
{
	for (; modem.plus_count; modem.plus_count--)
		let_through('+');
}

/* Three pluses, and nothing after them for long enough. */
static void notice_escape(uint64_t at_us)
{
	if (!modem.plus_count || at_us - modem.last_byte_us < ESCAPE_SILENCE_US)
		return;
	if (modem.plus_count < ESCAPE_BYTES) {
		let_held_through();
		return;
	}
	send_to_network();
	modem.plus_count = 0;
	modem.transparent = false;
	modem.command_length = 0;
	modem.deaf_until_us = modem.last_byte_us + ESCAPE_SILENCE_US + ESCAPE_DEAF_US;
	if (modem.tcp == TCP_DIALLING)
		hang_up();
}

static void take_transparent_byte(struct timed_byte byte)
{
	bool after_silence = byte.at_us - modem.last_byte_us >= ESCAPE_SILENCE_US;
	bool may_escape = byte.byte == '+' && modem.plus_count < ESCAPE_BYTES && (modem.plus_count || after_silence);
	modem.last_byte_us = byte.at_us;
	if (may_escape) {
		modem.plus_count++;
		return;
	}
	let_held_through();
	let_through(byte.byte);
}

static void take_byte(struct timed_byte byte)
{
	if (modem.off || modem.booted_at_us)
		return;
	if (modem.transparent)
		notice_escape(byte.at_us);
	if (modem.transparent)
		take_transparent_byte(byte);
	else if (byte.at_us >= modem.deaf_until_us)
		take_command_byte(byte.byte);
}

/* --- Time ---------------------------------------------------------------------------------------------------------- */

static void joined(void)
{
	modem.has_address = true;
	tell("WIFI CONNECTED\r\nWIFI GOT IP\r\n");
}

static void keep_time(uint64_t now_us)
{
	if (modem.booted_at_us && now_us >= modem.booted_at_us) {
		modem.booted_at_us = 0;
		say("\r\nready\r\n");
		if (modem.knows_network && modem.in_reach)
			modem.joins_at_us = now_us + JOIN_US;
	}
	if (modem.joins_at_us && now_us >= modem.joins_at_us) {
		modem.joins_at_us = 0;
		joined();
	}
	if (modem.command_at_us && now_us >= modem.command_at_us) {
		modem.command_at_us = 0;
		if (modem.in_reach) {
			joined();
			say("\r\nOK\r\n");
		} else {
			say("+CWJAP:3\r\n\r\nERROR\r\n"); /* 3: the access point was not found */
		}
	}
	if (modem.transparent)
		notice_escape(now_us);
	if (modem.tcp == TCP_DIALLING)
		check_dialling();
	bool redials = modem.transparent && modem.tcp == TCP_CLOSED && modem.has_address;
	if (redials && now_us >= modem.redial_at_us && !dial())
		dial_failed();
}

static void power_on(void)
{
	modem.off = false;
	modem_restart();
}

bool modem_exchange(void)
{
	static struct timed_byte heard[LINE_BYTES_MAX];
	size_t count = line_from_chip(heard);
	for (size_t i = 0; i < count; i++)
		take_byte(heard[i]);
	if (modem.off && chip_is_on())
		power_on();
	if (modem.off)
		return count > 0;
	keep_time(chip_us());
	bool moved = count > 0;
	if (modem.tcp == TCP_OPEN)
		moved |= send_to_network();
	/* A chip that is off takes nothing: what comes stays in the network's buffers. */
	if (modem.tcp == TCP_OPEN && chip_is_on())
		moved |= receive_from_network();
	return moved;
}

struct pollfd modem_pollfd(void)
{
	struct pollfd network = {.fd = modem.tcp == TCP_CLOSED ? -1 : modem.fd};
	network.events = modem.tcp == TCP_DIALLING || modem.to_send_count ? POLLOUT : 0;
	if (modem.tcp == TCP_OPEN && line_room() > LINE_BYTES_MAX / 2)
		network.events |= POLLIN;
	return network;
}

/* --- Power and reach ----------------------------------------------------------------------------------------------- */

void modem_set_wifi(bool in_reach)
{
	if (in_reach == modem.in_reach)
		return;
	modem.in_reach = in_reach;
	if (in_reach) {
		if (modem.knows_network && !modem.booted_at_us)
			modem.joins_at_us = chip_us() + REJOIN_US;
		return;
	}
	modem.joins_at_us = 0;
	if (modem.tcp == TCP_OPEN)
		tell("CLOSED\r\n");
	if (modem.has_address)
		tell("WIFI DISCONNECT\r\n");
	modem.has_address = false;
	if (modem.tcp == TCP_DIALLING)
		dial_failed();
	forsake();
}

void modem_power_off(void)
{
	forsake();
	modem.off = true;
	modem.transparent = modem.has_address = modem.command_dials = false;
}

void modem_restart(void)
{
	if (modem.off)
		return;
	static const char boot_rom[] = "\r\n ets Jan  8 2013,rst cause:2, boot mode:(3,6)\r\n\r\nload 0x40100000\r\n";
	uint8_t misread[2 * sizeof boot_rom];
	forsake();
	modem.echo = true;
	modem.transparent_mode = modem.transparent = modem.has_address = modem.command_dials = false;
	modem.joins_at_us = modem.command_at_us = modem.deaf_until_us = 0;
	modem.command_length = modem.plus_count = 0;
	modem.booted_at_us = chip_us() + BOOT_US;
	line_to_chip(misread, uart_hear((const uint8_t *)boot_rom, sizeof boot_rom - 1, BOOT_ROM_BAUD, BAUD, misread,
					sizeof misread),
		     0);
}

void modem_start(void)
{
	line_set_far_baud(BAUD);
	modem.in_reach = true;
	modem_restart();
}
