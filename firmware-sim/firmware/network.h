/* The gateway's address and the way to it, from the EEPROM (struct network). It is read each time that it is needed, as
 * it would take a tenth of the RAM. */
#ifndef NETWORK_H
#define NETWORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "eeprom_layout.h"

enum {
	NETWORK_HOST = EEPROM_NETWORK + offsetof(struct network, host),
	NETWORK_SSID = EEPROM_NETWORK + offsetof(struct network, ssid),
	NETWORK_PASSPHRASE = EEPROM_NETWORK + offsetof(struct network, passphrase),
	NETWORK_SECRET = EEPROM_NETWORK + offsetof(struct network, secret),
};

/* Whether the EEPROM holds a whole and undamaged struct network. The functions below are for that case only. */
bool network_valid(void);

uint16_t network_port(void);

/* Write one of the texts above at `to`, without its zero byte, and return where the next byte goes. */
uint8_t *network_put(uint8_t *to, uint16_t text);

/* Write a text in quotation marks, as AT commands want it, with a backslash before characters that would end it. */
uint8_t *network_put_quoted(uint8_t *to, uint16_t text);

#endif
