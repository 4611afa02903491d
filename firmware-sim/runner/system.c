#include "system.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	fputs("avr-runner: ", stderr);
	vfprintf(stderr, format, arguments);
	fputc('\n', stderr);
	va_end(arguments);
	exit(1);
}

static uint64_t clock_us(clockid_t which)
{
	struct timespec now;
	clock_gettime(which, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

uint64_t boottime_us(void)
{
	return clock_us(CLOCK_BOOTTIME);
}

uint64_t realtime_us(void)
{
	return clock_us(CLOCK_REALTIME);
}

uint64_t boot_began_us(void)
{
	uint64_t began_us = 0, narrowest_us = UINT64_MAX;
	/* Whoever is interrupted between two clocks looks again. */
	for (unsigned tries = 0; tries < 5 && narrowest_us > 2; tries++) {
		uint64_t before_us = boottime_us(), wall_us = realtime_us(), width_us = boottime_us() - before_us;
		if (width_us < narrowest_us) {
			narrowest_us = width_us;
			began_us = wall_us - before_us - width_us / 2;
		}
	}
	return began_us;
}

void fill_random(void *to, size_t length)
{
	uint8_t *at = to;
	while (length) {
		ssize_t got = getrandom(at, length, 0);
		if (got < 0 && errno != EINTR)
			fail("the system gives no random bytes: %s", strerror(errno));
		if (got > 0) {
			at += got;
			length -= (size_t)got;
		}
	}
}

double next_unit(uint64_t *state)
{
	uint64_t z = *state += 0x9E3779B97F4A7C15u;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}
