/* What the two fuzzers share: a seeded generator, and the law that no input may break. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>

enum { FUZZ_TURNS = 4000 };

uint32_t fuzz_below(uint32_t limit);

/* Flip a bit, lose, double or invent a byte: each with a chance of one in `odds` a byte. Gives the new length; `to` has
 * room for twice as many. */
uint16_t fuzz_damage(uint8_t *to, const uint8_t *from, uint16_t length, uint32_t odds);

/* Give the board bytes, as they are. */
void fuzz_receive(const uint8_t *bytes, uint16_t length);

/* Before each turn of the main loop: feed the board. Given by fuzz_serial.c and fuzz_mqtt.c. */
void fuzz_feed(uint32_t now_ms, uint32_t odds);

/* A case begins: the EEPROM to start from, and what is remembered of the last case to be forgotten. */
void fuzz_prepare(void);

/* What the board has sent. */
void fuzz_take(const uint8_t *bytes, uint16_t length, uint32_t now_ms);

/* End with a message if a law does not hold. */
void fuzz_check(int holds, const char *law);

#endif
