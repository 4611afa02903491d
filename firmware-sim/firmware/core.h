/* Holds the samples and decides which to send next: the ring, the send window, repetition with back-off.
 * It knows no hardware and no link. Time is passed in, and the ledger (ledger.h) hears what happens to each sample. */
#ifndef CORE_H
#define CORE_H

#include <stdbool.h>
#include <stdint.h>

#ifndef RING_SAMPLES
#define RING_SAMPLES 64 /* a power of two, so that a sequence finds its place by masking */
#endif

/* A run's sequences end before they wrap, as the gateway's ACKs reach no further. */
#define SEQUENCE_END (UINT32_MAX - 1)

enum {
	WINDOW_SAMPLES = 8, /* under way at once: sent, and neither acknowledged nor known to be lost */
	SPAN_SAMPLES = 32,  /* from the oldest unacknowledged one on: as far as an ACK's bitmap reaches */
	/* Time to wait for an answer: FIRST before a round trip was measured, then two of them and MIN; at most MAX. */
	PATIENCE_MS_FIRST = 1000,
	PATIENCE_MS_MIN = 150,
	PATIENCE_MS_MAX = 8000,
	/* After this many time-outs in a row, only the oldest sample tries the line, ever more rarely. */
	EXPIRED_SILENT = 10,
	PAYLOAD_BYTES_MAX = 24,
};

/* Start with an empty ring at sequence 0. */
void core_start(void);

/* Put a sample, in hundredths of a degree Celsius, into the ring. A full ring drops its oldest sample, sent or not.
 * Then `oldest` (docs/frames.md) moves on, and the gateway counts a sample that it has not stored as lost. */
void core_take(uint32_t tick_ms, int16_t centi_celsius);

/* The oldest sequence held, or the next one to come if none is held. */
uint32_t core_oldest(void);

/* The sequence that the next sample will get. */
uint32_t core_next(void);

/* Whether a sample is due to be sent now, and which. The caller reports by core_sent that it was sent. */
bool core_due(uint32_t now_ms, uint32_t *sequence);
void core_sent(uint32_t sequence, uint32_t now_ms);

struct reading {
	uint32_t sequence;
	uint32_t tick_ms;
	int16_t centi_celsius; /* hundredths of a degree */
};

/* Take the oldest sample out of the ring; false if the ring is empty. For a link that itself keeps samples until they
 * are acknowledged. The ring then drops only samples that were never sent, so a dropped sample is certainly lost. Such
 * a link uses none of core_due, core_sent, core_acknowledge and core_resend. */
bool core_hand_over(struct reading *reading);

/* The tick of a held sample. */
uint32_t core_tick_ms(uint32_t sequence);

/* Write a held sample as JSON, `{"celsius":21.53}`, and return its length, at most PAYLOAD_BYTES_MAX. */
uint8_t core_payload(uint32_t sequence, uint8_t *payload);

/* All samples below `next` are safe, and so is `next + 1 + i` for each bit i that is set. If `next` lies beyond all
 * sent samples, nothing is done and false is returned: the answer was meant for another run of the sensor. */
bool core_acknowledge(uint32_t next, uint32_t bitmap, uint32_t now_ms);

/* The other side is new, or has forgotten this sensor: all sent but unacknowledged samples go again. */
void core_resend(uint32_t now_ms);

#endif
