/* A Wi-Fi module with ESP-AT commands on the serial line: joins the network, dials the gateway and goes into
 * transparent mode, in which all bytes belong to the connection; or leaves it and dials anew. A state machine that
 * never waits.
 *
 * If the connection breaks in transparent mode, such a module dials again by itself and tells nobody. So the caller
 * must find out that the other side is gone, and call modem_hang_up. */
#ifndef MODEM_H
#define MODEM_H

#include <stdbool.h>
#include <stdint.h>

enum {
	MODEM_BUFFER_BYTES = 210,
	/* Pauses between attempts: 1, 2, 4, ... 64 s, each times a random factor between a half and one and a half. */
	MODEM_PAUSE_MS_FIRST = 1000,
	MODEM_PAUSE_DOUBLINGS_MAX = 6,
};

/* Begin, whatever state the module is in: the chip's reset does not reset the module. `random` makes the pauses
 * differ from board to board. */
void modem_start(uint32_t random, uint32_t now_ms);

/* Do what is due. */
void modem_poll(uint32_t now_ms);

/* Take in a received byte. True if it came over the connection, false if it is from the module itself. */
bool modem_receive(uint8_t byte, uint32_t now_ms);

/* Whether bytes now go to the gateway. */
bool modem_connected(void);

/* The buffer for the next bytes to send, MODEM_BUFFER_BYTES long; NULL while the last bytes are still leaving. */
uint8_t *modem_buffer(void);
void modem_send(const uint8_t *bytes, uint8_t length);

/* The other side has shown that it works, so the next pause is short again. */
void modem_proved(void);

/* Leave transparent mode, close the connection, and dial again after a pause. */
void modem_hang_up(uint32_t now_ms);

/* Let the next pause be the longest, for a fault that does not heal by itself. Call it before modem_hang_up. */
void modem_not_soon(void);

#endif
