/* The ATmega328P: its program, its power and resets, its time, what it measures, and what it reports of its samples. */
#ifndef CHIP_H
#define CHIP_H

#include <stdbool.h>
#include <stdint.h>

#include <simavr/sim_avr.h>

enum { CHIP_HZ = 16000000 };

/* As MCUSR names them. */
enum reset_cause {
	POWER_ON = 1,
	EXTERNAL = 2,
	BROWN_OUT = 4,
	WATCHDOG = 8,
};

/* Make the chip with its program and switch it on. The seed decides what it measures. */
avr_t *chip_make(const char *elf_path, const char *eeprom_path, uint64_t seed);

/* Let that many cycles of the chip's clock pass, whether it runs or is off. Gives how many passed: a few more. */
uint64_t chip_run(uint64_t cycles);

/* Time since the board was switched on, by the chip's own clock, and the cycles of which it is made; resets do not start
 * it anew. */
uint64_t chip_us(void);
uint64_t chip_cycle(void);

bool chip_is_on(void);

/* Called after every reset, of whatever cause. */
void chip_on_reset(void (*notify)(void));

/* Pull the reset pin. */
void chip_reset(void);

/* Stop the chip at once, whatever it does, and start it after so many milliseconds with that cause. RAM is lost. */
void chip_power_off(uint32_t off_ms, enum reset_cause cause);

/* Switch off and on, and let the supply fail again while the firmware counts the boot in its EEPROM: a brown-out. */
void chip_power_off_in_write(uint32_t off_ms, unsigned written_well);

/* Erase the EEPROM, or only the boot counter as if the chip had been provisioned again; programming resets the chip. */
void chip_erase(bool all);

/* The jumper that stops sampling. */
void chip_inhibit(bool inhibited);
bool chip_inhibited(void);

/* The speed of the chip's UART in baud, as it has set it, if its oscillator were exact. */
double chip_baud(void);

/* How far the stack ever reached down from the end of RAM, and how many bytes there are for it. */
struct stack {
	uint16_t used;
	uint16_t room;
};
struct stack chip_stack(void);

#endif
