/* The chip's EEPROM: its file, and a supply that fails while it is written. */
#ifndef EEPROM_H
#define EEPROM_H

#include <stdbool.h>

#include <simavr/sim_avr.h>

#include "../firmware/eeprom_layout.h"

/* Take the image from the file, or an erased one where there is none. Ends the program where that fails. */
void eeprom_load(avr_t *avr, const char *path);

/* Write the file anew, by temporary file and rename, if anything changed. */
void eeprom_save(void);

/* Set the first bytes, or all, to 0xFF: what a chip erase leaves. */
void eeprom_erase(bool all);

/* Let the supply fail at one of the bytes that the firmware writes next: that byte is spoilt, and `failed` is called.
 * The byte is given by how many of them are still written well. */
void eeprom_fail_write(unsigned written_well, void (*failed)(void));

/* No failure after all. True where one was still to come. */
bool eeprom_fail_write_no_more(void);

/* The device's name as the firmware reads it. */
void eeprom_device_name(char name[DEVICE_BYTES_MAX + 1]);

#endif
