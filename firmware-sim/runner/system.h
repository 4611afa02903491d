/* What the runner asks of the operating system: time, randomness, and an end with a message. */
#ifndef SYSTEM_H
#define SYSTEM_H

#include <stddef.h>
#include <stdint.h>

/* Print "avr-runner: " and the message, and end with exit code 1. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

uint64_t monotonic_us(void);
uint64_t realtime_us(void); /* since 1970 */

/* Bytes that no seed repeats. */
void fill_random(void *to, size_t length);

/* The next number from 0 (included) to 1 (not included) of a series that its state alone decides: splitmix64. */
double next_unit(uint64_t *state);

#endif
