/* Numbers and words as text. Each function writes at `to` and returns where the next one goes; no zero byte at the
 * end. */
#ifndef TEXT_H
#define TEXT_H

#include <stdint.h>

uint8_t *text_put(uint8_t *to, const char *words);
uint8_t *text_put_decimal(uint8_t *to, uint32_t number);

/* Eight digits. */
uint8_t *text_put_hex(uint8_t *to, uint32_t number);

/* 2153 as 21.53. */
uint8_t *text_put_hundredths(uint8_t *to, int16_t number);

#endif
