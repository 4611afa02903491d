/* A Wi-Fi module with ESP-AT commands on the serial line: joins the network, dials the gateway and goes into
 * transparent mode, where all bytes belong to the connection; or leaves it and dials anew. A state machine that never
 * waits.
 *
 * In transparent mode such a module dials again by itself when the connection breaks, and tells nobody. That the other
 * side is gone is for the user of this to find out, and to say by modem_hang_up. */
#ifndef MODEM_H
#define MODEM_H

#include <stdbool.h>
#include <stdint.h>

enum {
	MODEM_BUFFER_BYTES = 210,
	/* Pauses between attempts: 1, 2, 4, ... 64 s, each by chance between half and one and a half of that. */
	MODEM_PAUSE_MS_FIRST = 1000,
	MODEM_PAUSE_DOUBLINGS_MAX = 6,
};

/* Begin, from whatever state the module is in: the chip's reset does not reset it. `random` (not 0) makes the pauses
 * differ from board to board. */
void modem_start(uint32_t random, uint32_t now_ms);

/* Do what is due. */
void modem_poll(uint32_t now_ms);

/* Take in a received byte. True when it came over the connection, false when it was the module's own word. */
bool modem_receive(uint8_t byte, uint32_t now_ms);

/* Whether bytes now go to the gateway. */
bool modem_connected(void);

/* Where to write what is to be sent next, MODEM_BUFFER_BYTES long; NULL as long as the last bytes are still leaving. */
uint8_t *modem_buffer(void);
void modem_send(const uint8_t *bytes, uint8_t length);

/* The other side has shown that it works: the next pause is a short one again. */
void modem_proved(void);

/* Leave transparent mode, close the connection, and dial again after a pause. */
void modem_hang_up(uint32_t now_ms);

/* Let the next pause be the longest: what is wrong will not heal by itself. Before modem_hang_up. */
void modem_not_soon(void);

#endif
