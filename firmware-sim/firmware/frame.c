#include "frame.h"

#include <stddef.h>

#include "crc32.h"

uint8_t *put_u16(uint8_t *to, uint16_t value)
{
	*to++ = (uint8_t)value;
	*to++ = (uint8_t)(value >> 8);
	return to;
}

uint8_t *put_u32(uint8_t *to, uint32_t value)
{
	return put_u16(put_u16(to, (uint16_t)value), (uint16_t)(value >> 16));
}

uint32_t get_u32(const uint8_t *from)
{
	return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

uint8_t frame_encode(uint8_t *frame, uint8_t length)
{
	put_u32(frame + 1 + length, crc32(frame + 1, length));
	uint8_t end = 1 + length + FRAME_CRC_BYTES;
	/* Below 254 bytes COBS is a chain: each zero becomes the distance to the next one. */
	uint8_t code_at = 0;
	for (uint8_t at = 1; at < end; at++) {
		if (frame[at] == 0) {
			frame[code_at] = at - code_at;
			code_at = at;
		}
	}
	frame[code_at] = end - code_at;
	frame[end] = 0;
	return end + 1;
}

/* Undo the chain in place; false if it does not end where the frame ends. */
static bool cobs_decode(uint8_t *bytes, uint8_t length)
{
	uint16_t at = bytes[0];
	while (at < length) {
		uint8_t distance = bytes[at];
		bytes[at] = 0;
		at += distance;
	}
	return at == length;
}

const uint8_t *frame_receive(struct frame_receiver *receiver, uint8_t byte, uint8_t *length)
{
	if (byte != 0) {
		if (receiver->length < sizeof receiver->bytes)
			receiver->bytes[receiver->length++] = byte;
		else
			receiver->skipping = true;
		return NULL;
	}
	uint8_t received = receiver->length;
	bool skipping = receiver->skipping;
	receiver->length = 0;
	receiver->skipping = false;
	if (skipping || received < 1 + 1 + FRAME_CRC_BYTES || !cobs_decode(receiver->bytes, received))
		return NULL;
	uint8_t content_length = received - 1 - FRAME_CRC_BYTES;
	const uint8_t *content = receiver->bytes + 1;
	if (get_u32(content + content_length) != crc32(content, content_length))
		return NULL;
	*length = content_length;
	return content;
}
