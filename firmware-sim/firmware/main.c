/* An 8-bit sensor: samples on time, hands over to the link, sleeps. */
#include "board.h"
#include "core.h"
#include "identity.h"
#include "ledger.h"
#include "link.h"

int main(void)
{
	static struct identity identity;
	board_start();
	identity_start(&identity);
	ledger_boot(identity.boot, identity.incarnation);
	core_start();
	link_start(&identity);

	uint32_t sample_at_ms = board_now_ms();
	uint32_t sample_tick_ms = sample_at_ms;
	for (;;) {
		uint32_t now_ms = board_now_ms();
		if ((int32_t)(now_ms - sample_at_ms) >= 0) {
			sample_at_ms += identity.sample_interval_ms;
			if (!board_sampling_inhibited()) {
				sample_tick_ms = now_ms;
				board_measure();
			}
		}
		int16_t centi_celsius;
		if (board_measured(&centi_celsius))
			core_take(sample_tick_ms, centi_celsius);
		/* If the sequence is used up (497 days at 100 samples a second), the watchdog begins a new run. */
		while (core_next() >= SEQUENCE_END)
			;
		link_poll(now_ms);
		board_wait();
	}
}
