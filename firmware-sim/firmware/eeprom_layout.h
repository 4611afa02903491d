/* What stands where in the EEPROM, little-endian. Shared with the simulator's runner. */
#ifndef EEPROM_LAYOUT_H
#define EEPROM_LAYOUT_H

#include <stdint.h>

enum {
	/* Two slots, written in turn: losing power in the middle of a write spoils only one. */
	EEPROM_BOOT_SLOT_A = 0,
	EEPROM_BOOT_SLOT_B = 16,
	EEPROM_CONFIGURATION = 32,
	CONFIGURATION_VERSION = 1,
	DEVICE_BYTES_MAX = 32,
};

struct boot_slot {
	uint32_t boot;
	uint32_t incarnation;
	uint32_t crc; /* CRC-32 of what stands before it */
} __attribute__((packed));

struct configuration {
	uint8_t version;
	uint8_t device_length;
	char device[DEVICE_BYTES_MAX];
	uint32_t sample_interval_ms;
	uint32_t crc; /* CRC-32 of what stands before it */
} __attribute__((packed));

#endif
