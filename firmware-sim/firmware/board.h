/* Everything that touches the hardware, here an ATmega328P at 16 MHz. To port the sensor, write another board.c. */
#ifndef BOARD_H
#define BOARD_H

#include <stdbool.h>
#include <stdint.h>

struct instant {
	uint32_t ms; /* since the start, unless the EEPROM says otherwise (struct clock_start); wraps after 49.7 days */
	uint16_t us; /* 0 to 999 */
};

/* Start the clock, the serial line, the converter and the watchdog (1 s). */
void board_start(void);

/* MCUSR as it was at the start: bit 0 power-on, 1 external, 2 brown-out, 3 watchdog. */
uint8_t board_reset_cause(void);

uint32_t board_now_ms(void);

/* Tell the watchdog that the main loop is alive, then sleep until an interrupt brings something new. */
void board_wait(void);

/* A 32-bit number that no other board and no other erasure is likely to make. Takes 30 ms. */
uint32_t board_random(void);

void board_eeprom_read(uint16_t address, void *to, uint8_t length);
void board_eeprom_write(uint16_t address, const void *from, uint8_t length);

/* Begin a measurement. When it is done, board_measured returns true once, with hundredths of a degree Celsius. */
void board_measure(void);
bool board_measured(int16_t *centi_celsius);

/* Whether the jumper from D2 (PD2) to ground is set, which stops sampling. */
bool board_sampling_inhibited(void);

/* The LED on D13 (PB5). */
void board_led(bool on);

/* Take a received byte out of the queue; false if there is none. */
bool board_serial_read(uint8_t *byte);

/* When the last zero byte, the end of a frame, came in. */
struct instant board_serial_zero_at(void);

/* Whether all bytes given to board_serial_send are on their way, so that their buffer is free again. */
bool board_serial_idle(void);
void board_serial_send(const uint8_t *bytes, uint8_t length);

#endif
