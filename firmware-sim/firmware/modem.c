#include "modem.h"

#include <stddef.h>
#include <string.h>

#include "board.h"
#include "network.h"
#include "text.h"

enum {
	/* `+++` ends transparent mode if nothing else is sent for 20 ms before and after it. The next command must come
	 * 1 s later (ESP-AT's manual). A chip's clock may be 1 % off. */
	GUARD_MS = 50,
	ESCAPE_MS = 1100,
	BUSY_MS = 1000,
	BUSY_MAX = 30,
	FIRST_PAUSE_MS_MAX = 1000,
	/* After this many failed attempts the module is restarted, and again after as many more. */
	FAILURES_BEFORE_RESTART = 5,
	LINE_BYTES_MAX = 18,
};

/* The steps in their order. */
enum step {
	GUARD,  /* silence before the escape */
	ESCAPE, /* silence after it */
	ATTENTION,
	RESTART, /* left out, unless attempts failed */
	ECHO_OFF,
	STATION,
	CLOSE,
	PAUSE,
	JOIN, /* left out if joined, or if the module joins by itself */
	PASS_THROUGH,
	DIAL,
	SEND,
	CONNECTED,
};

struct command {
	const char *words;
	uint16_t patience_ms;
};

/* Restarting, joining and dialling take as long as the network takes. ESP-AT's own limits lie below these. */
static const struct command commands[] = {
	/* The first line end finishes whatever stands in the module's line, such as `+++`. */
	[ATTENTION] = {"\r\nAT", 1000},
	[RESTART] = {"AT+RST", 10000},
	[ECHO_OFF] = {"ATE0", 1000},
	[STATION] = {"AT+CWMODE=1", 1000},
	[CLOSE] = {"AT+CIPCLOSE", 5000},
	[JOIN] = {"AT+CWJAP=", 25000},
	[PASS_THROUGH] = {"AT+CIPMODE=1", 1000},
	[DIAL] = {"AT+CIPSTART=\"TCP\",", 20000},
	[SEND] = {"AT+CIPSEND", 5000},
};

#define QUOTED_BYTES_MAX(field) (2 + 2 * (sizeof((struct network *)0)->field - 1))
_Static_assert(sizeof "AT+CWJAP=,\r\n" - 1 + QUOTED_BYTES_MAX(ssid) + QUOTED_BYTES_MAX(passphrase) <=
		       MODEM_BUFFER_BYTES,
	"the longest command fits, every character escaped");

static struct {
	enum step step;
	bool asked;        /* the step's command was given, and its answer is awaited */
	bool joined;
	uint32_t since_ms; /* of the step, or of its command */
	uint16_t wait_ms;  /* before the command goes out */
	uint8_t busy;      /* times that the module was busy with another command */
	uint8_t failures;
	uint32_t pause_ms; /* 0: dial at once */
	uint32_t random;
	char line[LINE_BYTES_MAX];
	uint8_t line_length; /* above LINE_BYTES_MAX: too long to be of interest */
	uint8_t buffer[MODEM_BUFFER_BYTES];
} modem;

/* The upper sixteen bits of xorshift32 (Marsaglia 2003). */
static uint16_t chance(void)
{
	uint32_t x = modem.random;
	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	modem.random = x;
	return (uint16_t)(x >> 16);
}

static void enter(enum step step, uint32_t now_ms)
{
	modem.step = step;
	modem.asked = false;
	modem.since_ms = now_ms;
	modem.wait_ms = 0;
	modem.busy = 0;
}

void modem_start(uint32_t random, uint32_t now_ms)
{
	memset(&modem, 0, sizeof modem);
	modem.random = random ? random : 1;
	/* A random pause, as after a power cut all boards of a site start at once. */
	modem.pause_ms = (uint32_t)chance() * FIRST_PAUSE_MS_MAX >> 16;
	enter(GUARD, now_ms);
}

void modem_hang_up(uint32_t now_ms)
{
	uint8_t doublings = modem.failures;
	if (doublings > MODEM_PAUSE_DOUBLINGS_MAX)
		doublings = MODEM_PAUSE_DOUBLINGS_MAX;
	uint32_t mean_ms = (uint32_t)MODEM_PAUSE_MS_FIRST << doublings;
	modem.pause_ms = mean_ms / 2 + ((uint32_t)chance() * mean_ms >> 16);
	/* The counter steps back at its end, so that a restart still comes only after FAILURES_BEFORE_RESTART more. */
	if (modem.failures++ == UINT8_MAX)
		modem.failures -= FAILURES_BEFORE_RESTART;
	enter(GUARD, now_ms);
}

void modem_not_soon(void)
{
	if (modem.failures < MODEM_PAUSE_DOUBLINGS_MAX)
		modem.failures = MODEM_PAUSE_DOUBLINGS_MAX;
}

void modem_proved(void)
{
	modem.failures = 0;
}

bool modem_connected(void)
{
	return modem.step == CONNECTED;
}

uint8_t *modem_buffer(void)
{
	return board_serial_idle() ? modem.buffer : NULL;
}

void modem_send(const uint8_t *bytes, uint8_t length)
{
	board_serial_send(bytes, length);
}

static void give_command(uint32_t now_ms)
{
	uint8_t *end = text_put(modem.buffer, commands[modem.step].words);
	if (modem.step == JOIN) {
		end = network_put_quoted(end, NETWORK_SSID);
		*end++ = ',';
		end = network_put_quoted(end, NETWORK_PASSPHRASE);
	} else if (modem.step == DIAL) {
		end = network_put_quoted(end, NETWORK_HOST);
		*end++ = ',';
		end = text_put_decimal(end, network_port());
	}
	end = text_put(end, "\r\n");
	modem.asked = true;
	modem.since_ms = now_ms;
	modem.line_length = 0;
	modem_send(modem.buffer, (uint8_t)(end - modem.buffer));
}

static void next_step(uint32_t now_ms)
{
	enum step next = modem.step + 1;
	if (next == RESTART && (modem.failures == 0 || modem.failures % FAILURES_BEFORE_RESTART != 0))
		next++;
	uint8_t ssid;
	board_eeprom_read(NETWORK_SSID, &ssid, 1);
	if (next == JOIN && (modem.joined || ssid == 0))
		next++;
	enter(next, now_ms);
}

void modem_poll(uint32_t now_ms)
{
	bool idle = board_serial_idle();
	uint32_t passed_ms = now_ms - modem.since_ms;
	switch (modem.step) {
	case GUARD:
	case ESCAPE:
		if (!idle) {
			modem.since_ms = now_ms;
		} else if (modem.step == ESCAPE) {
			if (passed_ms >= ESCAPE_MS)
				next_step(now_ms);
		} else if (passed_ms >= GUARD_MS) {
			static const uint8_t escape[] = {'+', '+', '+'};
			enter(ESCAPE, now_ms);
			modem_send(escape, sizeof escape);
		}
		return;
	case PAUSE:
		if (passed_ms >= modem.pause_ms)
			next_step(now_ms);
		return;
	case CONNECTED:
		return;
	default:
		if (!modem.asked) {
			if (idle && passed_ms >= modem.wait_ms)
				give_command(now_ms);
		} else if (passed_ms >= commands[modem.step].patience_ms) {
			modem.joined = false;
			modem_hang_up(now_ms);
		}
	}
}

static bool line_is(const char *words)
{
	size_t length = strlen(words);
	return modem.line_length == length && memcmp(modem.line, words, length) == 0;
}

static void take_ok(uint32_t now_ms)
{
	/* These two steps wait for another word: "ready", and the prompt. */
	if (modem.step == RESTART || modem.step == SEND)
		return;
	if (modem.step == JOIN)
		modem.joined = true;
	next_step(now_ms);
}

static void take_refusal(uint32_t now_ms)
{
	switch (modem.step) {
	case ATTENTION: /* the rest in the module's line was no command */
		return;
	case CLOSE: /* there was no connection */
		next_step(now_ms);
		return;
	case DIAL:
		modem.joined = false;
		break;
	default:
		break;
	}
	modem_hang_up(now_ms);
}

static void take_line(uint32_t now_ms)
{
	if (line_is("WIFI DISCONNECT")) {
		modem.joined = false;
	} else if (line_is("ready")) {
		/* The module has restarted, by command or by itself, and has forgotten its settings. */
		modem.joined = false;
		if (modem.step == RESTART)
			enter(ECHO_OFF, now_ms);
		else if (modem.step > RESTART && modem.step != PAUSE)
			enter(ATTENTION, now_ms);
	} else if (!modem.asked) {
		return;
	} else if (line_is("OK")) {
		take_ok(now_ms);
	} else if (line_is("ERROR") || line_is("FAIL")) {
		take_refusal(now_ms);
	} else if (line_is("busy p...") || line_is("busy s...")) {
		/* This command went unheard. The answer to the other command must not be taken for its answer. */
		if (++modem.busy > BUSY_MAX) {
			modem_hang_up(now_ms);
			return;
		}
		modem.asked = false;
		modem.since_ms = now_ms;
		modem.wait_ms = BUSY_MS;
	}
}

bool modem_receive(uint8_t byte, uint32_t now_ms)
{
	if (modem.step == CONNECTED)
		return true;
	if (byte == '>' && modem.step == SEND && modem.asked && modem.line_length == 0) {
		enter(CONNECTED, now_ms);
	} else if (byte == '\n') {
		take_line(now_ms);
		modem.line_length = 0;
	} else if (byte != '\r') {
		if (modem.line_length < LINE_BYTES_MAX)
			modem.line[modem.line_length] = (char)byte;
		if (modem.line_length <= LINE_BYTES_MAX)
			modem.line_length++;
	}
	return false;
}
