/* Frames as in docs/frames.md: COBS, CRC-32, a zero byte at the end. No hardware, so that it runs on a host too. */
#ifndef FRAME_H
#define FRAME_H

#include <stdbool.h>
#include <stdint.h>

enum {
	FRAME_SENT_CONTENT_MAX = 128,
	FRAME_RECEIVED_CONTENT_MAX = 32,
	FRAME_CRC_BYTES = 4,
	/* The COBS code in front, the CRC behind and the zero at the end. */
	FRAME_SENT_BYTES_MAX = 1 + FRAME_SENT_CONTENT_MAX + FRAME_CRC_BYTES + 1,
	FRAME_RECEIVED_BYTES_MAX = 1 + FRAME_RECEIVED_CONTENT_MAX + FRAME_CRC_BYTES,
};

/* Turn the content in frame[1 .. length] into a frame, in place. Returns the number of bytes to send, with the zero. */
uint8_t frame_encode(uint8_t *frame, uint8_t length);

struct frame_receiver {
	uint8_t bytes[FRAME_RECEIVED_BYTES_MAX];
	uint8_t length;
	bool skipping;
};

/* Take in one byte. Returns the content (and its length) if the byte ended a good frame, else NULL. The content is
 * valid until the next call. Frames that are damaged, empty or too long are dropped. */
const uint8_t *frame_receive(struct frame_receiver *receiver, uint8_t byte, uint8_t *length);

/* Little-endian fields: write at `to` and return where the next one goes, or read. */
uint8_t *put_u16(uint8_t *to, uint16_t value);
uint8_t *put_u32(uint8_t *to, uint32_t value);
uint32_t get_u32(const uint8_t *from);

#endif
