/* The wires at the chip's UART, both ways, with what can go wrong on them. */
#ifndef LINE_H
#define LINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <simavr/sim_avr.h>

enum { LINE_BYTES_MAX = 4096 };

struct timed_byte {
	uint64_t at_us; /* when the line has carried it, by chip_us */
	uint8_t byte;
};

/* The seed decides which bytes noise hits. */
void line_connect(avr_t *avr, uint64_t seed);

/* The share of bytes, 0 to 1, of which one bit is flipped, each way. */
void line_set_noise(double share);

/* So many of the next bytes from the chip are lost. */
void line_lose(uint32_t count);

/* The speed of who is at the other end; the chip's is known. Above 4 % of difference, bytes are misread. */
void line_set_far_baud(double baud);
/* A speed that stands whatever the other end sets, until 0 is given. */
void line_force_far_baud(double baud);

/* How many bytes the line takes now on their way to the chip; more of them are lost. */
size_t line_room(void);
/* They begin to go over the line at a time of CLOCK_BOOTTIME: a chip that is behind does not hear them before they were
 * sent. 0: at once. */
void line_to_chip(const uint8_t *bytes, size_t count, uint64_t since_us);

/* Take what the other end has heard of what the chip sent since the last call: whole bytes, each as long on the line as
 * its bits are. Gives how many, at most LINE_BYTES_MAX. */
size_t line_from_chip(struct timed_byte *heard);

/* Whether bytes are on their way, either way. */
bool line_busy(void);

/* After a reset the chip's UART is empty. */
void line_chip_was_reset(void);

#endif
