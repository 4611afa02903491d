/* The serial link: HELLO, DATA, ACK, PROBE, REPLY and COMMAND as in docs/frames.md. */
#include <string.h>

#include "board.h"
#include "command.h"
#include "core.h"
#include "frame.h"
#include "link.h"

enum {
	HELLO = 1,
	DATA = 2,
	ACK = 3,
	PROBE = 4,
	REPLY = 5,
	HELLO_REQUEST = 6,
	COMMAND = 7,
	COMMAND_REPLY = 8,

	FRAME_VERSION = 1,
	STREAM_THERMO = 0,
	HELLO_INTERVAL_MS = 1000,
	/* Each DATA of a whole window may be answered with HELLO_REQUEST. One HELLO answers them all. */
	HELLO_INTERVAL_MS_MIN = 100,

	ACK_BYTES = 13,
	PROBE_BYTES = 5,
	HELLO_REQUEST_BYTES = 1,
	COMMAND_HEAD_BYTES = 9,

	DONE = 0,
	NOT_KNOWN = 1,
};

static const char firmware[] = "sluice-avr 0.1.0";
static const char streams[] = "thermo";

_Static_assert(1 + 1 + 4 + 4 + 1 + 4 + 4 + 1 + DEVICE_BYTES_MAX + sizeof firmware + sizeof streams <=
		       FRAME_SENT_CONTENT_MAX,
	"HELLO fits into a frame");

static struct {
	const struct identity *identity;
	struct frame_receiver receiver;
	uint8_t frame[FRAME_SENT_BYTES_MAX];
	uint32_t hello_at_ms;
	uint32_t hello_sent_ms;
	bool introduced;  /* the gateway has answered the HELLO */
	bool hello_asked; /* asked for a HELLO, and none was sent since: an ACK on its way answers no HELLO */
	bool reply_due;
	uint8_t reply_nonce[4];
	struct instant reply_at;
	bool commanded; /* a command was acted on in this run: command_number, with command_result */
	bool command_reply_due;
	uint8_t command_result;
	uint32_t command_number;
} link;

void link_start(const struct identity *identity)
{
	memset(&link, 0, sizeof link);
	link.identity = identity;
	link.hello_at_ms = board_now_ms();
	link.hello_sent_ms = link.hello_at_ms - HELLO_INTERVAL_MS_MIN;
	/* The zero ends a frame that a reset cut off, which would spoil the HELLO. */
	static const uint8_t end_of_frame = 0;
	board_serial_send(&end_of_frame, 1);
}

/* The name of this run. The boot counter alone begins again in an erased EEPROM. */
static uint32_t run(void)
{
	return link.identity->boot ^ link.identity->incarnation;
}

/* A command whose answer was lost comes again under its number, and is only answered again. */
static void command(uint32_t number, const uint8_t *payload, uint8_t length)
{
	if (!link.commanded || number != link.command_number) {
		link.commanded = true;
		link.command_number = number;
		link.command_result = command_do(payload, length) ? DONE : NOT_KNOWN;
	}
	link.command_reply_due = true;
}

static void receive(const uint8_t *content, uint8_t length, uint32_t now_ms)
{
	switch (content[0]) {
	case ACK:
		if (length != ACK_BYTES || get_u32(content + 1) != run())
			return;
		if (!core_acknowledge(get_u32(content + 5), get_u32(content + 9), now_ms))
			return;
		if (!link.introduced && !link.hello_asked) {
			link.introduced = true;
			core_resend(now_ms);
		}
		return;
	case PROBE:
		if (length != PROBE_BYTES)
			return;
		link.reply_due = true;
		memcpy(link.reply_nonce, content + 1, sizeof link.reply_nonce);
		link.reply_at = board_serial_zero_at();
		return;
	case HELLO_REQUEST:
		if (length != HELLO_REQUEST_BYTES)
			return;
		link.introduced = false;
		link.hello_asked = true;
		link.hello_at_ms = now_ms;
		if (now_ms - link.hello_sent_ms < HELLO_INTERVAL_MS_MIN)
			link.hello_at_ms = link.hello_sent_ms + HELLO_INTERVAL_MS_MIN;
		return;
	case COMMAND:
		if (length < COMMAND_HEAD_BYTES || get_u32(content + 1) != run())
			return;
		command(get_u32(content + 5), content + COMMAND_HEAD_BYTES, length - COMMAND_HEAD_BYTES);
		return;
	default:
		return;
	}
}

static uint8_t *put_text(uint8_t *to, const char *text, uint8_t length)
{
	*to++ = length;
	memcpy(to, text, length);
	return to + length;
}

static uint8_t *write_hello(uint8_t *to)
{
	const struct identity *identity = link.identity;
	*to++ = HELLO;
	*to++ = FRAME_VERSION;
	to = put_u32(to, identity->boot);
	to = put_u32(to, identity->incarnation);
	*to++ = board_reset_cause();
	to = put_u32(to, core_oldest());
	to = put_u32(to, core_next());
	to = put_text(to, identity->device, identity->device_length);
	to = put_text(to, firmware, sizeof firmware - 1);
	return put_text(to, streams, sizeof streams - 1);
}

static uint8_t *write_data(uint8_t *to, uint32_t sequence)
{
	*to++ = DATA;
	to = put_u32(to, run());
	to = put_u32(to, sequence);
	to = put_u32(to, core_oldest());
	to = put_u32(to, core_tick_ms(sequence));
	*to++ = STREAM_THERMO;
	return to + core_payload(sequence, to);
}

static uint8_t *write_reply(uint8_t *to)
{
	*to++ = REPLY;
	memcpy(to, link.reply_nonce, sizeof link.reply_nonce);
	to = put_u32(to + sizeof link.reply_nonce, link.reply_at.ms);
	return put_u16(to, link.reply_at.us);
}

static uint8_t *write_command_reply(uint8_t *to)
{
	*to++ = COMMAND_REPLY;
	to = put_u32(to, run());
	to = put_u32(to, link.command_number);
	*to++ = link.command_result;
	return to;
}

void link_poll(uint32_t now_ms)
{
	uint8_t byte;
	while (board_serial_read(&byte)) {
		uint8_t length;
		const uint8_t *content = frame_receive(&link.receiver, byte, &length);
		if (content)
			receive(content, length, now_ms);
	}
	if (!board_serial_idle())
		return;
	uint8_t *content = link.frame + 1;
	uint8_t *end;
	uint32_t sequence;
	if (link.reply_due) {
		link.reply_due = false;
		end = write_reply(content);
	} else if (link.command_reply_due) {
		link.command_reply_due = false;
		end = write_command_reply(content);
	} else if (!link.introduced && (int32_t)(now_ms - link.hello_at_ms) >= 0) {
		link.hello_asked = false;
		link.hello_sent_ms = now_ms;
		link.hello_at_ms = now_ms + HELLO_INTERVAL_MS;
		end = write_hello(content);
	} else if (link.introduced && core_due(now_ms, &sequence)) {
		end = write_data(content, sequence);
		core_sent(sequence, now_ms);
	} else {
		return;
	}
	board_serial_send(link.frame, frame_encode(link.frame, (uint8_t)(end - content)));
}
