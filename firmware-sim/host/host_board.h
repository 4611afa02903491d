/* A board in the memory of this machine: its time, its serial line and its EEPROM belong to a test. */
#ifndef HOST_BOARD_H
#define HOST_BOARD_H

#include <stdbool.h>
#include <stdint.h>

#include "identity.h"
#include "ledger.h"

enum { HOST_EEPROM_BYTES = 1024 };

extern uint8_t host_eeprom[HOST_EEPROM_BYTES];

/* Told of each event that the firmware reports; `value` goes with LEDGER_BOOT (incarnation) and LEDGER_TAKEN
 * (hundredths of a degree). May be NULL. */
extern void (*host_ledger)(enum ledger_event event, uint32_t number, int32_t value);

/* Switch on: all but the EEPROM starts anew. `seed` is what board_random gives. */
void host_start(uint32_t seed, uint32_t now_ms);

/* Who the board says it is, since host_start. */
const struct identity *host_identity(void);

/* Whether the LED is on, and how many times a command has set it since host_start. */
bool host_led(void);
uint32_t host_led_switched(void);

/* The line has brought a byte. False where the receive queue is full, and the byte lost. */
bool host_receive(uint8_t byte);

/* One turn of the main loop, at that time. */
void host_turn(uint32_t now_ms);

/* Take out what was sent, up to `length` bytes; gives how many. A byte leaves 10 bits at 38400 baud after the other,
 * but is given here at once. */
uint16_t host_sent(uint8_t *to, uint16_t length);

#endif
