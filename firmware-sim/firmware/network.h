/* Where the gateway is and how to get there, from the EEPROM (struct network). Read from there each time it is needed,
 * for it would take a tenth of the RAM. */
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

/* The same between quotation marks, as AT commands want it: what would end it has a backslash in front. */
uint8_t *network_put_quoted(uint8_t *to, uint16_t text);

#endif
