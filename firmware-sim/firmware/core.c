#include "core.h"

#include "ledger.h"

_Static_assert(RING_SAMPLES > WINDOW_SAMPLES && (RING_SAMPLES & (RING_SAMPLES - 1)) == 0,
	"RING_SAMPLES is a power of two above the window");

enum {
	ACKNOWLEDGED = 1,
	AGAIN = 2,    /* lost, as far as we know: to be sent again */
	REPEATED = 4, /* sent again because a later one arrived; from now on only the time-out repeats it */
};

struct sample {
	uint32_t tick_ms;
	int16_t centi_celsius;
	uint8_t state;
};

static struct {
	struct sample ring[RING_SAMPLES];
	uint32_t oldest; /* lowest sequence that is held and unacknowledged */
	uint32_t unsent; /* lowest sequence that was never sent; oldest <= unsent <= next */
	uint32_t next;
	uint32_t answered; /* the highest `next` that an acknowledgement named */
	uint32_t resend_at_ms;
	uint16_t resend_ms;
	bool silent; /* a time-out passed without an answer: the oldest sample alone tests the line */
} core;

static struct sample *held(uint32_t sequence)
{
	return &core.ring[sequence & (RING_SAMPLES - 1)];
}

void core_start(void)
{
	core.oldest = core.unsent = core.next = core.answered = 0;
	core.resend_ms = RESEND_MS_FIRST;
	core.silent = false;
}

static void advance_oldest(void)
{
	while (core.oldest < core.next && (held(core.oldest)->state & ACKNOWLEDGED))
		core.oldest++;
	if (core.unsent < core.oldest)
		core.unsent = core.oldest;
}

void core_take(uint32_t tick_ms, int16_t centi_celsius)
{
	if (core.next - core.oldest == RING_SAMPLES) {
		ledger_dropped(core.oldest);
		core.oldest++;
		advance_oldest();
	}
	*held(core.next) = (struct sample){tick_ms, centi_celsius, 0};
	ledger_taken(core.next);
	core.next++;
}

uint32_t core_oldest(void)
{
	return core.oldest;
}

uint32_t core_next(void)
{
	return core.next;
}

bool core_due(uint32_t now_ms, uint32_t *sequence)
{
	if (core.oldest == core.next)
		return false;
	if (core.silent || core.oldest < core.unsent) {
		bool expired = (int32_t)(now_ms - core.resend_at_ms) >= 0;
		if (expired)
			core.silent = true;
		if (core.silent) {
			*sequence = core.oldest;
			return expired;
		}
	}
	for (uint32_t at = core.oldest; at < core.unsent; at++) {
		if ((held(at)->state & (AGAIN | ACKNOWLEDGED)) == AGAIN) {
			*sequence = at;
			return true;
		}
	}
	*sequence = core.unsent;
	return core.unsent < core.next && core.unsent - core.oldest < WINDOW_SAMPLES;
}

void core_sent(uint32_t sequence, uint32_t now_ms)
{
	held(sequence)->state &= (uint8_t)~AGAIN;
	if (sequence == core.unsent) {
		core.unsent++;
		ledger_sent(sequence);
	}
	if (core.silent && core.resend_ms < RESEND_MS_MAX)
		core.resend_ms *= 2;
	if (sequence == core.oldest)
		core.resend_at_ms = now_ms + core.resend_ms;
}

uint32_t core_tick_ms(uint32_t sequence)
{
	return held(sequence)->tick_ms;
}

uint8_t core_payload(uint32_t sequence, uint8_t *payload)
{
	static const char key[] = "{\"celsius\":";
	uint8_t *at = payload;
	for (const char *from = key; *from; from++)
		*at++ = (uint8_t)*from;
	int16_t value = held(sequence)->centi_celsius;
	uint16_t magnitude = value < 0 ? (uint16_t)-(uint16_t)value : (uint16_t)value;
	if (value < 0)
		*at++ = '-';
	uint8_t digits[5];
	uint8_t count = 0;
	/* At least three digits, so that there is always one in front of the point. */
	while (magnitude || count < 3) {
		digits[count++] = '0' + magnitude % 10;
		magnitude /= 10;
	}
	while (count) {
		if (count == 2)
			*at++ = '.';
		*at++ = digits[--count];
	}
	*at++ = '}';
	return (uint8_t)(at - payload);
}

static void restart_time_out(uint32_t now_ms)
{
	core.resend_ms = RESEND_MS_FIRST;
	core.resend_at_ms = now_ms + RESEND_MS_FIRST;
}

static bool acknowledge_one(uint32_t sequence)
{
	if (sequence < core.oldest || sequence >= core.unsent || (held(sequence)->state & ACKNOWLEDGED))
		return false;
	held(sequence)->state |= ACKNOWLEDGED;
	ledger_acknowledged(sequence);
	return true;
}

bool core_acknowledge(uint32_t next, uint32_t bitmap, uint32_t now_ms)
{
	if (next > core.unsent)
		return false;
	/* An answer counts although the ring has dropped what it speaks of: the line is alive. */
	bool news = next > core.answered;
	if (news)
		core.answered = next;
	for (uint32_t at = core.oldest; at < next; at++)
		news |= acknowledge_one(at);
	uint32_t arrived = next;
	for (uint8_t bit = 0; bitmap; bit++, bitmap >>= 1) {
		if ((bitmap & 1) && next + 1 + bit < core.unsent) {
			arrived = next + 1 + bit;
			news |= acknowledge_one(arrived);
		}
	}
	advance_oldest();
	/* A serial line keeps the order: what lies below one that arrived, and did not arrive, was lost. */
	for (uint32_t at = core.oldest; at < arrived; at++) {
		struct sample *sample = held(at);
		if (!(sample->state & (ACKNOWLEDGED | REPEATED)))
			sample->state |= AGAIN | REPEATED;
	}
	if (news) {
		if (core.silent)
			core_resend(now_ms);
		restart_time_out(now_ms);
	}
	return true;
}

void core_resend(uint32_t now_ms)
{
	core.silent = false;
	restart_time_out(now_ms);
	for (uint32_t at = core.oldest; at < core.unsent; at++)
		held(at)->state |= AGAIN;
}
