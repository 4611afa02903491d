/* The board's name and its present run, from the EEPROM. */
#ifndef IDENTITY_H
#define IDENTITY_H

#include <stdint.h>

#include "eeprom_layout.h"

struct identity {
	uint32_t boot;
	uint32_t incarnation;
	uint32_t sample_interval_ms;
	uint8_t device_length;
	char device[DEVICE_BYTES_MAX];
};

/* Count this start in the EEPROM, and fill in the rest; with defaults if no configuration was written. */
void identity_start(struct identity *identity);

#endif
