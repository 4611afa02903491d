/* The layout of the EEPROM, little-endian. Shared with the simulator's runner. */
#ifndef EEPROM_LAYOUT_H
#define EEPROM_LAYOUT_H

#include <stdint.h>

enum {
	/* Two slots, written in turn: a power cut in the middle of a write spoils only one. */
	EEPROM_BOOT_SLOT_A = 0,
	EEPROM_BOOT_SLOT_B = 16,
	EEPROM_CONFIGURATION = 32,
	CONFIGURATION_VERSION = 1,
	DEVICE_BYTES_MAX = 32,
	EEPROM_CLOCK_START = 80,
	EEPROM_NETWORK = 96,
	NETWORK_VERSION = 1,
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

/* Start of the millisecond clock, for tests of its wrap. If this was never written, the clock starts at 0. */
struct clock_start {
	uint32_t ms;
	uint32_t crc; /* CRC-32 of what stands before it */
} __attribute__((packed));

/* The gateway of the MQTT build, and the way to it. Each text ends with a zero byte. */
struct network {
	uint8_t version;
	uint16_t port;
	char host[64];
	char ssid[33];       /* empty: the modem joins by itself */
	char passphrase[64]; /* empty: an open network */
	char secret[48];     /* the device's password; empty: it has none */
	uint32_t crc;        /* CRC-32 of what stands before it */
} __attribute__((packed));

#endif
