#include "core.h"

#include <string.h>

#include "ledger.h"
#include "text.h"

_Static_assert(RING_SAMPLES > SPAN_SAMPLES && (RING_SAMPLES & (RING_SAMPLES - 1)) == 0,
	"RING_SAMPLES is a power of two above the span");

enum {
	ACKNOWLEDGED = 1,
	UNDER_WAY = 2, /* sent, and nothing shows that it was lost */
	AGAIN = 4,     /* most likely lost: to be sent again */
};

struct sample {
	uint32_t tick_ms;
	int16_t centi_celsius;
	uint8_t state;
	uint8_t order; /* number of the transmission: one that did not arrive, but a later one did, was lost */
};

static struct {
	struct sample ring[RING_SAMPLES];
	uint32_t oldest; /* lowest sequence that is held and unacknowledged */
	uint32_t unsent; /* lowest sequence that was never sent; oldest <= unsent <= next */
	uint32_t next;
	uint32_t answered; /* the highest `next` that an acknowledgement named */
	uint8_t under_way, again; /* samples in these states */
	uint8_t order;            /* of the last transmission */
	uint8_t expired;          /* time-outs since the last answer */
	bool probe;               /* nobody answers, and the oldest sample is due to try the line */
	bool timing;              /* the round trip of `timed`, sent once, at timed_at_ms, is being measured */
	uint32_t timed, timed_at_ms;
	uint32_t expires_at_ms;
	uint16_t patience_ms;
	uint16_t round_trip_ms; /* smoothed; 0 before the first */
} core;

static struct sample *held(uint32_t sequence)
{
	return &core.ring[sequence & (RING_SAMPLES - 1)];
}

void core_start(void)
{
	memset(&core, 0, sizeof core);
	core.patience_ms = PATIENCE_MS_FIRST;
}

static bool silent(void)
{
	return core.expired >= EXPIRED_SILENT;
}

/* Take a sample out of the counts of samples under way and of samples to send again. */
static void uncount(struct sample *sample)
{
	if (sample->state & UNDER_WAY)
		core.under_way--;
	if (sample->state & AGAIN)
		core.again--;
	sample->state &= (uint8_t)~(UNDER_WAY | AGAIN);
}

static void send_again(struct sample *sample)
{
	uncount(sample);
	sample->state |= AGAIN;
	core.again++;
}

static void be_patient_from(uint32_t now_ms)
{
	uint32_t patience_ms = core.round_trip_ms ? 2UL * core.round_trip_ms + PATIENCE_MS_MIN : PATIENCE_MS_FIRST;
	core.patience_ms = patience_ms < PATIENCE_MS_MAX ? (uint16_t)patience_ms : PATIENCE_MS_MAX;
	core.expires_at_ms = now_ms + core.patience_ms;
}

static void wait_from(uint32_t now_ms)
{
	core.expires_at_ms = now_ms + core.patience_ms;
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
		uncount(held(core.oldest));
		/* An answer to a dropped sample is not recognised. */
		if (core.oldest == core.timed)
			core.timing = false;
		core.oldest++;
		advance_oldest();
	}
	*held(core.next) = (struct sample){tick_ms, centi_celsius, 0, 0};
	ledger_taken(core.next, centi_celsius);
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

static void expire(uint32_t now_ms)
{
	if (!silent())
		core.expired++;
	if (silent()) {
		core.probe = true;
		core.patience_ms = core.patience_ms < PATIENCE_MS_MAX / 2 ? core.patience_ms * 2 : PATIENCE_MS_MAX;
	} else {
		send_again(held(core.oldest));
	}
	wait_from(now_ms);
}

bool core_due(uint32_t now_ms, uint32_t *sequence)
{
	if (core.oldest == core.next)
		return false;
	if ((core.under_way || silent()) && (int32_t)(now_ms - core.expires_at_ms) >= 0)
		expire(now_ms);
	*sequence = core.oldest;
	if (silent())
		return core.probe;
	if (core.again) {
		while (!(held(*sequence)->state & AGAIN))
			(*sequence)++;
		return true;
	}
	*sequence = core.unsent;
	return core.unsent < core.next && core.under_way < WINDOW_SAMPLES && core.unsent - core.oldest < SPAN_SAMPLES;
}

void core_sent(uint32_t sequence, uint32_t now_ms)
{
	struct sample *sample = held(sequence);
	if (sequence == core.unsent) {
		core.unsent++;
		ledger_sent(sequence);
		if (!core.timing) {
			core.timing = true;
			core.timed = sequence;
			core.timed_at_ms = now_ms;
		}
	} else if (sequence == core.timed) {
		/* The answer may be to the first transmission or to this one. */
		core.timing = false;
	}
	uncount(sample);
	sample->state |= UNDER_WAY;
	sample->order = ++core.order;
	if (core.under_way++ == 0 && !silent())
		wait_from(now_ms);
	core.probe = false;
}

bool core_hand_over(struct reading *reading)
{
	if (core.oldest == core.next)
		return false;
	const struct sample *sample = held(core.oldest);
	*reading = (struct reading){core.oldest, sample->tick_ms, sample->centi_celsius};
	ledger_sent(core.oldest);
	core.oldest++;
	core.unsent = core.oldest;
	return true;
}

uint32_t core_tick_ms(uint32_t sequence)
{
	return held(sequence)->tick_ms;
}

uint8_t core_payload(uint32_t sequence, uint8_t *payload)
{
	uint8_t *end = text_put(payload, "{\"celsius\":");
	end = text_put_hundredths(end, held(sequence)->centi_celsius);
	*end++ = '}';
	return (uint8_t)(end - payload);
}

static void measure_round_trip(uint32_t now_ms)
{
	uint32_t took_ms = now_ms - core.timed_at_ms;
	core.timing = false;
	if (took_ms > PATIENCE_MS_MAX)
		took_ms = PATIENCE_MS_MAX;
	core.round_trip_ms =
		core.round_trip_ms ? (uint16_t)((7UL * core.round_trip_ms + took_ms + 4) / 8) : (uint16_t)took_ms;
}

static bool acknowledge_one(uint32_t sequence, uint32_t now_ms, uint8_t *arrived)
{
	struct sample *sample = held(sequence);
	if (sequence < core.oldest || sequence >= core.unsent || (sample->state & ACKNOWLEDGED))
		return false;
	if (core.timing && sequence == core.timed)
		measure_round_trip(now_ms);
	if ((int8_t)(sample->order - *arrived) > 0)
		*arrived = sample->order;
	uncount(sample);
	sample->state |= ACKNOWLEDGED;
	ledger_acknowledged(sequence);
	return true;
}

bool core_acknowledge(uint32_t next, uint32_t bitmap, uint32_t now_ms)
{
	if (next > core.unsent)
		return false;
	/* An answer counts even if the ring has dropped its samples: the line is alive. */
	bool news = next > core.answered;
	if (news)
		core.answered = next;
	uint8_t arrived = core.order - INT8_MAX;
	for (uint32_t at = core.oldest; at < next; at++)
		news |= acknowledge_one(at, now_ms, &arrived);
	for (uint8_t bit = 0; bitmap; bit++, bitmap >>= 1)
		if (bitmap & 1)
			news |= acknowledge_one(next + 1 + bit, now_ms, &arrived);
	advance_oldest();
	if (!news)
		return true;
	if (silent()) {
		core_resend(now_ms);
		return true;
	}
	/* A serial line keeps the order: if a sample arrived, those that were sent before it and did not were lost. */
	for (uint32_t at = core.oldest; at < core.unsent; at++) {
		struct sample *sample = held(at);
		if ((sample->state & UNDER_WAY) && (int8_t)(arrived - sample->order) > 0)
			send_again(sample);
	}
	core.expired = 0;
	be_patient_from(now_ms);
	return true;
}

void core_resend(uint32_t now_ms)
{
	core.expired = 0;
	core.timing = false;
	be_patient_from(now_ms);
	for (uint32_t at = core.oldest; at < core.unsent; at++)
		if (!(held(at)->state & ACKNOWLEDGED))
			send_again(held(at));
}
