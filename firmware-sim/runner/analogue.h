/* The analogue inputs: a TMP36-like sensor on ADC0, a floating pin ADC7. */
#ifndef ANALOGUE_H
#define ANALOGUE_H

#include <stdint.h>

#include <simavr/sim_avr.h>

void analogue_connect(avr_t *avr, uint64_t seed, uint64_t (*now_us)(void));

/* When the measurement that is over began, in CLOCK_BOOTTIME; the next conversion begins another one. */
uint64_t analogue_measured_us(void);

#endif
