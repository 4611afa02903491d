#include "uart_bits.h"

enum { BITS_PER_BYTE = 10, DATA_BITS = 8 }; /* a start bit and a stop bit about them */

/* The line's level at a time that counts the sender's bits. */
static unsigned level(const uint8_t *sent, size_t count, double at)
{
	size_t bit = (size_t)at;
	if (bit / BITS_PER_BYTE >= count)
		return 1;
	size_t within = bit % BITS_PER_BYTE;
	if (within == 0)
		return 0;
	return within > DATA_BITS ? 1 : sent[bit / BITS_PER_BYTE] >> (within - 1) & 1;
}

size_t uart_hear(const uint8_t *sent, size_t count, double sent_baud, double own_baud, uint8_t *heard, size_t room)
{
	double own_bit = sent_baud / own_baud;
	double listening_from = 0;
	size_t got = 0;
	for (size_t edge = 0; edge < count * BITS_PER_BYTE && got < room; edge++) {
		unsigned before = edge ? level(sent, count, (double)edge - 0.5) : 1;
		if ((double)edge < listening_from || !before || level(sent, count, (double)edge + 0.5))
			continue;
		uint8_t byte = 0;
		for (unsigned bit = 0; bit < DATA_BITS; bit++)
			byte |= (uint8_t)(level(sent, count, (double)edge + (1.5 + bit) * own_bit) << bit);
		heard[got++] = byte;
		listening_from = (double)edge + (1.5 + DATA_BITS) * own_bit;
	}
	return got;
}
