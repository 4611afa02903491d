/* Tells what happens to each sample, through the registers GPIOR0 and GPIOR1. The simulator keeps an exact account from
 * it. On a real board it is a few writes that nobody reads. */
#ifndef LEDGER_H
#define LEDGER_H

#include <stdint.h>

/* Written to GPIOR0 after the event's numbers went through GPIOR1, least significant byte first. */
enum ledger_event {
	LEDGER_BOOT = 1,     /* boot, incarnation: 8 bytes */
	LEDGER_TAKEN = 2,    /* sequence, hundredths of a degree as int32: 8 bytes; all others: sequence, 4 bytes */
	LEDGER_SENT = 3,     /* for the first time */
	LEDGER_ACKNOWLEDGED = 4,
	LEDGER_DROPPED = 5,
};

void ledger_boot(uint32_t boot, uint32_t incarnation);
void ledger_taken(uint32_t sequence, int16_t centi_celsius);
void ledger_sent(uint32_t sequence);
void ledger_acknowledged(uint32_t sequence);
void ledger_dropped(uint32_t sequence);

#endif
