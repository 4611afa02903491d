#include "eeprom.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <simavr/avr_eeprom.h>

#include "system.h"

enum {
	EEPROM_BYTES = 1024,
	BOOT_SLOTS_BYTES = EEPROM_CONFIGURATION,
	EECR_ADDRESS = 0x3F,
	EEPE_MASK = 0x02,
};

static struct {
	const char *path;
	uint8_t *bytes; /* the chip's own */
	uint8_t saved[EEPROM_BYTES];
	uint8_t before_write[EEPROM_BYTES];
	unsigned written_well;
	void (*failed)(void); /* null: the supply holds */
} eeprom;

/* simavr has written the byte already: it was registered first. */
static void control_written(avr_t *avr, avr_io_addr_t address, uint8_t value, void *unused)
{
	(void)avr;
	(void)address;
	(void)unused;
	if (!eeprom.failed || !(value & EEPE_MASK))
		return;
	for (unsigned at = 0; at < EEPROM_BYTES; at++) {
		if (eeprom.bytes[at] == eeprom.before_write[at])
			continue;
		if (eeprom.written_well) {
			eeprom.written_well--;
			eeprom.before_write[at] = eeprom.bytes[at];
			continue;
		}
		/* Erased, and some of its bits not programmed any more. */
		uint8_t unprogrammed;
		fill_random(&unprogrammed, sizeof unprogrammed);
		eeprom.bytes[at] |= unprogrammed;
		void (*failed)(void) = eeprom.failed;
		eeprom.failed = NULL;
		failed();
		return;
	}
}

void eeprom_load(avr_t *avr, const char *path)
{
	/* With a null pointer simavr gives its own memory; the call's result is not a success code in every version. */
	avr_eeprom_desc_t whole = {.ee = NULL, .offset = 0, .size = 1};
	avr_ioctl(avr, AVR_IOCTL_EEPROM_GET, &whole);
	if (!whole.ee)
		fail("this simavr gives no access to the EEPROM");
	eeprom.path = path;
	eeprom.bytes = whole.ee;
	eeprom_erase(true);
	avr_register_io_write(avr, EECR_ADDRESS, control_written, NULL);
	FILE *file = fopen(path, "rbe");
	if (!file) {
		if (errno == ENOENT)
			return;
		fail("cannot read the EEPROM file %s: %s", path, strerror(errno));
	}
	size_t got = fread(eeprom.bytes, 1, EEPROM_BYTES, file);
	if (got != EEPROM_BYTES)
		fail("%s has %zu bytes where an ATmega328P's EEPROM has %d; delete it to start with an erased one",
		     path, got, EEPROM_BYTES);
	fclose(file);
	memcpy(eeprom.saved, eeprom.bytes, EEPROM_BYTES);
}

void eeprom_save(void)
{
	if (memcmp(eeprom.bytes, eeprom.saved, EEPROM_BYTES) == 0)
		return;
	char path_new[4096];
	snprintf(path_new, sizeof path_new, "%s.new", eeprom.path);
	FILE *file = fopen(path_new, "wbe");
	if (!file)
		fail("cannot write the EEPROM file %s: %s", path_new, strerror(errno));
	bool written = fwrite(eeprom.bytes, 1, EEPROM_BYTES, file) == EEPROM_BYTES;
	written &= fclose(file) == 0;
	if (!written || rename(path_new, eeprom.path) != 0)
		fail("cannot write the EEPROM file %s: %s", eeprom.path, strerror(errno));
	memcpy(eeprom.saved, eeprom.bytes, EEPROM_BYTES);
}

void eeprom_erase(bool all)
{
	memset(eeprom.bytes, 0xFF, all ? EEPROM_BYTES : BOOT_SLOTS_BYTES);
}

void eeprom_fail_write(unsigned written_well, void (*failed)(void))
{
	memcpy(eeprom.before_write, eeprom.bytes, EEPROM_BYTES);
	eeprom.written_well = written_well;
	eeprom.failed = failed;
}

bool eeprom_fail_write_no_more(void)
{
	bool was_to_come = eeprom.failed != NULL;
	eeprom.failed = NULL;
	return was_to_come;
}

void eeprom_device_name(char name[DEVICE_BYTES_MAX + 1])
{
	struct configuration configuration;
	memcpy(&configuration, eeprom.bytes + EEPROM_CONFIGURATION, sizeof configuration);
	strcpy(name, "unprovisioned");
	if (configuration.version != CONFIGURATION_VERSION || configuration.device_length > DEVICE_BYTES_MAX)
		return;
	for (uint8_t i = 0; i < configuration.device_length; i++)
		if (configuration.device[i] < ' ' || configuration.device[i] == '"' || configuration.device[i] == '\\')
			return;
	memcpy(name, configuration.device, configuration.device_length);
	name[configuration.device_length] = 0;
}
