#include "identity.h"

#include <stdbool.h>
#include <string.h>

#include "board.h"
#include "crc32.h"

#ifndef SAMPLE_INTERVAL_MS
#define SAMPLE_INTERVAL_MS 1000
#endif

enum { SAMPLE_INTERVAL_MS_MIN = 10 };

static bool read_slot(uint16_t address, struct boot_slot *slot)
{
	board_eeprom_read(address, slot, sizeof *slot);
	return slot->crc == crc32((const uint8_t *)slot, sizeof *slot - sizeof slot->crc);
}

static void count_boot(struct identity *identity)
{
	struct boot_slot a, b;
	bool a_valid = read_slot(EEPROM_BOOT_SLOT_A, &a);
	bool b_valid = read_slot(EEPROM_BOOT_SLOT_B, &b);
	struct boot_slot newest;
	uint16_t write_to = EEPROM_BOOT_SLOT_A;
	if (a_valid && (!b_valid || a.boot >= b.boot)) {
		newest = a;
		write_to = EEPROM_BOOT_SLOT_B;
	} else if (b_valid) {
		newest = b;
	} else {
		/* Erased or new: the count starts again, and a new random number tells it from the former count. */
		newest.boot = 0;
		newest.incarnation = board_random();
	}
	newest.boot++;
	newest.crc = crc32((const uint8_t *)&newest, sizeof newest - sizeof newest.crc);
	board_eeprom_write(write_to, &newest, sizeof newest);
	identity->boot = newest.boot;
	identity->incarnation = newest.incarnation;
}

void identity_start(struct identity *identity)
{
	static const char unprovisioned[] = "unprovisioned";
	count_boot(identity);
	struct configuration configuration;
	board_eeprom_read(EEPROM_CONFIGURATION, &configuration, sizeof configuration);
	if (configuration.version == CONFIGURATION_VERSION && configuration.device_length >= 1 &&
	    configuration.device_length <= DEVICE_BYTES_MAX &&
	    configuration.crc ==
		    crc32((const uint8_t *)&configuration, sizeof configuration - sizeof configuration.crc)) {
		identity->device_length = configuration.device_length;
		memcpy(identity->device, configuration.device, DEVICE_BYTES_MAX);
		identity->sample_interval_ms = configuration.sample_interval_ms;
	} else {
		identity->device_length = sizeof unprovisioned - 1;
		memcpy(identity->device, unprovisioned, sizeof unprovisioned - 1);
		identity->sample_interval_ms = SAMPLE_INTERVAL_MS;
	}
	if (identity->sample_interval_ms < SAMPLE_INTERVAL_MS_MIN)
		identity->sample_interval_ms = SAMPLE_INTERVAL_MS_MIN;
}
