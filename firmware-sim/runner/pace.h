/* Real time against the chip's: an oscillator that is exact, or wrong by some parts in a million. */
#ifndef PACE_H
#define PACE_H

#include <stdbool.h>
#include <stdint.h>

void pace_start(uint64_t now_us);

/* By how much the oscillator is too fast from now on. */
void pace_set_ppm(double ppm);
double pace_ppm(void);

/* How many cycles the chip is behind, and what it then ran of them. After a standstill of seconds (a suspended machine)
 * the chip does not hurry after the lost time. */
uint64_t pace_due(uint64_t now_us);
void pace_ran(uint64_t cycles);

/* The real time, in microseconds since 1970, at which the chip's present cycle was due: when what it does now happens in
 * the world that it lives in, however late this process comes to it. */
uint64_t pace_real_us(void);

/* Whether it still is: less was given than was due, so that bytes come and go meanwhile. */
bool pace_is_behind(void);

#endif
