/* What the sensor holds and what it sends next: the ring of samples, the send window, repetition with back-off.
 * No hardware and no link in it: time is passed in, and what happened is told to the ledger (ledger.h). */
#ifndef CORE_H
#define CORE_H

#include <stdbool.h>
#include <stdint.h>

#ifndef RING_SAMPLES
#define RING_SAMPLES 64 /* a power of two, so that a sequence finds its place by masking */
#endif

/* The sequences of a run end before they wrap: the gateway's ACKs reach no further either. */
#define SEQUENCE_END (UINT32_MAX - 1)

enum {
	WINDOW_SAMPLES = 8, /* under way at once: sent, and neither acknowledged nor known to be lost */
	SPAN_SAMPLES = 32,  /* from the oldest unacknowledged one on: as far as an ACK's bitmap reaches */
	/* How long an answer is awaited: before a round trip was measured; twice one and so much more; at the most. */
	PATIENCE_MS_FIRST = 1000,
	PATIENCE_MS_MIN = 150,
	PATIENCE_MS_MAX = 8000,
	/* So many time-outs in a row, and nobody is there: the oldest sample alone tries the line, ever more rarely. */
	EXPIRED_SILENT = 10,
	PAYLOAD_BYTES_MAX = 24,
};

/* Start with an empty ring at sequence 0. */
void core_start(void);

/* Put a sample into the ring; a full ring drops its oldest one, sent or not: docs/frames.md's `oldest` moves on, and the
 * gateway, which knows what it has stored, counts as lost what it has not. Hundredths of a degree Celsius. */
void core_take(uint32_t tick_ms, int16_t centi_celsius);

/* The oldest sequence held, or the next one to come where none is held. */
uint32_t core_oldest(void);

/* The sequence that the next sample will get. */
uint32_t core_next(void);

/* Whether a sample is due to be sent now, and which. Sending it is reported by core_sent. */
bool core_due(uint32_t now_ms, uint32_t *sequence);
void core_sent(uint32_t sequence, uint32_t now_ms);

struct reading {
	uint32_t sequence;
	uint32_t tick_ms;
	int16_t centi_celsius; /* hundredths of a degree */
};

/* Take the oldest sample out of the ring, for a link that keeps what is under way itself, and does so until it is
 * acknowledged: the ring then drops only what was never sent, and that a sample is lost is certain. Such a link uses
 * none of core_due, core_sent, core_acknowledge and core_resend. False where the ring is empty. */
bool core_hand_over(struct reading *reading);

/* The tick of a held sample. */
uint32_t core_tick_ms(uint32_t sequence);

/* Write a held sample as JSON, `{"celsius":21.53}`, and return its length, at most PAYLOAD_BYTES_MAX. */
uint8_t core_payload(uint32_t sequence, uint8_t *payload);

/* Everything below `next` is safe, and `next + 1 + i` is for each bit i. False, and nothing done, when it speaks of
 * samples that were never sent: such an answer was meant for another run of the sensor. */
bool core_acknowledge(uint32_t next, uint32_t bitmap, uint32_t now_ms);

/* The other side is new or has forgotten us: all that was sent and is unacknowledged goes again. */
void core_resend(uint32_t now_ms);

#endif
