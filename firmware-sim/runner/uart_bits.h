/* What a UART makes of bytes that were sent at another speed than its own. */
#ifndef UART_BITS_H
#define UART_BITS_H

#include <stddef.h>
#include <stdint.h>

/* Bytes sent without a pause, 8N1, as a receiver hears them that samples in the middle of its own bits after each falling
 * edge, and gives bytes with a framing error as they are. Gives how many were heard, at most `room`. */
size_t uart_hear(const uint8_t *sent, size_t count, double sent_baud, double own_baud, uint8_t *heard, size_t room);

#endif
