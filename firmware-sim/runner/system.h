/* What the runner asks of the operating system: time, randomness, and an end with a message. */
#ifndef SYSTEM_H
#define SYSTEM_H

#include <stddef.h>
#include <stdint.h>

/* Print "avr-runner: " and the message, and end with exit code 1. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

uint64_t boottime_us(void); /* CLOCK_BOOTTIME */
uint64_t realtime_us(void); /* since 1970 */

/* What CLOCK_BOOTTIME counts from, in microseconds since 1970, as the wall clock has it now. */
uint64_t boot_began_us(void);

/* Bytes that no seed repeats. */
void fill_random(void *to, size_t length);

/* The next number from 0 (included) to 1 (not included) of a series that its state alone decides: splitmix64. */
double next_unit(uint64_t *state);

#endif
