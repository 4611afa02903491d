/* Real time (CLOCK_BOOTTIME) against the chip's: an oscillator that is exact, or wrong by some parts in a million.
 *
 * Each cycle of the chip has its own instant of real time, which the oscillator alone decides, however busy this
 * machine is. The chip runs a cycle at that instant or later, never before. */
#ifndef PACE_H
#define PACE_H

#include <stdbool.h>
#include <stdint.h>

/* The chip's next cycle is at `now_us`. */
void pace_start(uint64_t now_us);

/* By how much the oscillator is too fast from the chip's next cycle on. */
void pace_set_ppm(double ppm);
double pace_ppm(void);

/* After a standstill of many seconds (a suspended machine) the chip does not hurry after the lost time: its clock then
 * stood still. Gives for how long; 0 when it did not. */
uint64_t pace_stood_still_us(uint64_t now_us);

/* How many cycles the chip is behind, and what it then ran of them. */
uint64_t pace_due(uint64_t now_us);
void pace_ran(uint64_t cycles);

/* Whether it still is: less was given than was due, so that bytes come and go meanwhile. */
bool pace_is_behind(void);

/* When a cycle is, counted from the first that pace_ran was told of: when what the chip does then happens in the world
 * that it lives in, however late this process comes to it. */
double pace_time_us(uint64_t cycle);

#endif
