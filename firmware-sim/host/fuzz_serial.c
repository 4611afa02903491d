/* The serial link's side of the fuzzer: a gateway that answers what it understands, over a line that damages, and
 * frames that no gateway would send. */
#include <string.h>

#include "core.h"
#include "frame.h"
#include "fuzz.h"
#include "host_board.h"

enum { ACK = 3, PROBE = 4, HELLO_REQUEST = 6, COMMAND = 7, DATA = 2, CONTENT_MAX = FRAME_RECEIVED_CONTENT_MAX + 8 };

static struct {
	uint8_t frame[FRAME_SENT_BYTES_MAX];
	uint16_t length;
	uint32_t next; /* everything below has come, or was dropped */
	bool away;     /* nobody answers, and the ring fills */
	bool begun;    /* the zero byte of a start, which ends what a reset has cut off, has come */
} gateway;

void fuzz_prepare(void)
{
	memset(&gateway, 0, sizeof gateway);
	memset(host_eeprom, 0xFF, sizeof host_eeprom);
}

static void send_frame(const uint8_t *content, uint8_t length, uint32_t odds)
{
	uint8_t frame[1 + CONTENT_MAX + FRAME_CRC_BYTES + 1];
	uint8_t damaged[2 * sizeof frame];
	memcpy(frame + 1, content, length);
	fuzz_receive(damaged, fuzz_damage(damaged, frame, frame_encode(frame, length), odds));
}

static uint32_t run(void)
{
	return host_identity()->boot ^ host_identity()->incarnation;
}

static uint8_t random_content(uint8_t *content)
{
	static const uint8_t lengths[] = {[0] = 1, [ACK] = 13, [PROBE] = 5, [HELLO_REQUEST] = 1, [COMMAND] = 14};
	uint8_t type = (uint8_t)fuzz_below(9);
	uint8_t length = type < sizeof lengths && lengths[type] && fuzz_below(4)
				 ? lengths[type]
				 : (uint8_t)(1 + fuzz_below(CONTENT_MAX));
	for (uint8_t i = 0; i < length; i++)
		content[i] = (uint8_t)fuzz_below(256);
	content[0] = type;
	if (type == ACK && length == 13) {
		/* About what this board could be told, right or not. */
		put_u32(content + 1, run() + (fuzz_below(8) == 0));
		put_u32(content + 5, core_oldest() + fuzz_below(12) - 2);
	} else if (type == COMMAND && length == 14) {
		put_u32(content + 1, run() + (fuzz_below(8) == 0));
		put_u32(content + 5, fuzz_below(3));
		memcpy(content + 9, fuzz_below(2) ? "led=1" : "led=2", 5);
	}
	return length;
}

void fuzz_feed(uint32_t now_ms, uint32_t odds)
{
	(void)now_ms;
	if (fuzz_below(500) == 0)
		gateway.away = !gateway.away;
	if (fuzz_below(40))
		return;
	uint8_t content[CONTENT_MAX];
	send_frame(content, random_content(content), odds);
}

/* Answer a good DATA with a cumulative ACK, most of the time. */
static void take_frame(uint32_t odds)
{
	uint8_t code_at = 0;
	uint8_t *frame = gateway.frame;
	while (code_at < gateway.length && frame[code_at]) {
		uint8_t following = code_at + frame[code_at];
		frame[code_at] = 0;
		code_at = following;
	}
	fuzz_check(code_at == gateway.length, "what is sent is a COBS frame");
	fuzz_check(gateway.length > 1 + FRAME_CRC_BYTES, "no frame is empty");
	if (frame[1] == DATA) {
		uint32_t sequence = get_u32(frame + 6);
		uint32_t oldest = get_u32(frame + 10);
		fuzz_check(oldest <= sequence, "a sample that is sent is held");
		if (gateway.next < oldest)
			gateway.next = oldest;
		if (sequence == gateway.next)
			gateway.next++;
	}
	if (gateway.away || fuzz_below(8) == 0)
		return;
	uint8_t ack[13] = {ACK};
	put_u32(put_u32(put_u32(ack + 1, run()), gateway.next), 0);
	send_frame(ack, sizeof ack, odds);
}

void fuzz_take(const uint8_t *bytes, uint16_t length, uint32_t now_ms)
{
	(void)now_ms;
	for (uint16_t i = 0; i < length; i++) {
		if (bytes[i]) {
			fuzz_check(gateway.length < sizeof gateway.frame, "no frame is longer than docs/frames.md says");
			gateway.frame[gateway.length++] = bytes[i];
		} else {
			if (gateway.begun)
				take_frame(1000);
			else
				fuzz_check(gateway.length == 0, "the first byte after a start is a zero");
			gateway.begun = true;
			gateway.length = 0;
		}
	}
}
