/* Run the firmware's portable part against damaged input, case after case, each from a seed of its own.
 *
 *   fuzz-serial SEED SECONDS      (the same for fuzz-mqtt)
 *
 * A case that the sanitizers or a law stop names its seed: with that and 0 seconds it runs alone. The law: each sample
 * is acknowledged or dropped at most once, and never acknowledged without having been sent. */
#include "fuzz.h"

#include <sanitizer/common_interface_defs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core.h"
#include "host_board.h"

enum { SAMPLES_MAX = FUZZ_TURNS, SENT_BYTES_MAX = 4096, IDLE_MS_MAX = 20000 };

static uint64_t case_seed, state;
static uint32_t taken;
static uint8_t known[SAMPLES_MAX]; /* bits: the events that a sample had */

static uint64_t next_random(void)
{
	/* splitmix64 */
	uint64_t z = state += 0x9E3779B97F4A7C15u;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	return z ^ z >> 31;
}

uint32_t fuzz_below(uint32_t limit)
{
	return (uint32_t)(next_random() % limit);
}

static void name_case(void)
{
	fprintf(stderr, "fuzz: stopped in case %llu; run it alone with that as SEED and 0 SECONDS\n",
		(unsigned long long)case_seed);
}

void fuzz_check(int holds, const char *law)
{
	if (holds)
		return;
	fprintf(stderr, "fuzz: this does not hold: %s\n", law);
	name_case();
	exit(1);
}

static void on_event(enum ledger_event event, uint32_t number, int32_t value)
{
	(void)value;
	if (event == LEDGER_BOOT)
		return;
	fuzz_check(number < SAMPLES_MAX, "events name samples that were taken");
	uint8_t *had = &known[number];
	switch (event) {
	case LEDGER_TAKEN:
		fuzz_check(number == taken++ && *had == 0, "samples are counted one by one");
		break;
	case LEDGER_SENT:
		fuzz_check(*had == 1 << LEDGER_TAKEN, "a sample is sent for the first time only once");
		break;
	case LEDGER_ACKNOWLEDGED:
		fuzz_check(*had == (1 << LEDGER_TAKEN | 1 << LEDGER_SENT), "acknowledged is what was sent, and once");
		break;
	default:
		fuzz_check(!(*had & (1 << LEDGER_ACKNOWLEDGED | 1 << LEDGER_DROPPED)), "dropped is what was neither");
	}
	*had |= (uint8_t)(1 << event);
}

uint16_t fuzz_damage(uint8_t *to, const uint8_t *from, uint16_t length, uint32_t odds)
{
	uint16_t at = 0;
	for (uint16_t i = 0; i < length; i++) {
		to[at++] = from[i];
		if (fuzz_below(odds))
			continue;
		switch (fuzz_below(4)) {
		case 0:
			to[at - 1] ^= (uint8_t)(1 << fuzz_below(8));
			break;
		case 1:
			at--;
			break;
		case 2:
			to[at++] = from[i];
			break;
		default:
			to[at++] = (uint8_t)fuzz_below(256);
		}
	}
	return at;
}

void fuzz_receive(const uint8_t *bytes, uint16_t length)
{
	for (uint16_t i = 0; i < length; i++)
		host_receive(bytes[i]);
}

static void run_case(uint64_t seed)
{
	case_seed = state = seed;
	taken = 0;
	memset(known, 0, sizeof known);
	fuzz_prepare();
	/* From a line without damage to one that carries nothing whole. */
	static const uint32_t levels[] = {UINT32_MAX, 1000, 100, 20, 5};
	uint32_t odds = levels[fuzz_below(sizeof levels / sizeof levels[0])];
	/* Often shortly before the clock wraps. */
	uint32_t now_ms = fuzz_below(2) ? fuzz_below(UINT32_MAX) : UINT32_MAX - fuzz_below(20000);
	host_start(fuzz_below(UINT32_MAX), now_ms);
	for (uint32_t turn = 0; turn < FUZZ_TURNS; turn++) {
		now_ms += fuzz_below(50) ? 1 + fuzz_below(20) : fuzz_below(IDLE_MS_MAX);
		if (taken < SAMPLES_MAX && !fuzz_below(4))
			core_take(now_ms, (int16_t)fuzz_below(65536));
		fuzz_feed(now_ms, odds);
		host_turn(now_ms);
		fuzz_check(core_next() - core_oldest() <= RING_SAMPLES, "the ring holds no more than it has room for");
		uint8_t sent[SENT_BYTES_MAX];
		uint16_t length = host_sent(sent, sizeof sent);
		if (length)
			fuzz_take(sent, length, now_ms);
	}
}

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "usage: %s SEED SECONDS\n", argv[0]);
		return 2;
	}
	uint64_t seed = strtoull(argv[1], NULL, 0);
	time_t end = time(NULL) + strtol(argv[2], NULL, 0);
	unsigned long cases = 0, acknowledged = 0, dropped = 0;
	__sanitizer_set_death_callback(name_case);
	host_ledger = on_event;
	do {
		run_case(seed + cases++);
		for (uint32_t i = 0; i < taken; i++) {
			acknowledged += (known[i] & 1 << LEDGER_ACKNOWLEDGED) != 0;
			dropped += (known[i] & 1 << LEDGER_DROPPED) != 0;
		}
	} while (time(NULL) < end);
	printf("%s: %lu cases from seed %llu, %lu samples acknowledged, %lu dropped\n", argv[0], cases,
	       (unsigned long long)seed, acknowledged, dropped);
	return 0;
}
