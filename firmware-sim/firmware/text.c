#include "text.h"

enum { DECIMALS_MAX = 10 };

uint8_t *text_put(uint8_t *to, const char *words)
{
	while (*words)
		*to++ = (uint8_t)*words++;
	return to;
}

/* Write at least `digits_min` digits, with a point in front of the last `places` if that is not 0. */
static uint8_t *put_digits(uint8_t *to, uint32_t number, uint8_t digits_min, uint8_t places)
{
	uint8_t digits[DECIMALS_MAX];
	uint8_t count = 0;
	while (number || count < digits_min) {
		digits[count++] = '0' + number % 10;
		number /= 10;
	}
	while (count) {
		if (count == places)
			*to++ = '.';
		*to++ = digits[--count];
	}
	return to;
}

uint8_t *text_put_decimal(uint8_t *to, uint32_t number)
{
	return put_digits(to, number, 1, 0);
}

uint8_t *text_put_hex(uint8_t *to, uint32_t number)
{
	for (uint8_t left = 8; left; left--) {
		uint8_t digit = (uint8_t)(number >> 28);
		*to++ = digit < 10 ? '0' + digit : 'a' - 10 + digit;
		number <<= 4;
	}
	return to;
}

uint8_t *text_put_hundredths(uint8_t *to, int16_t number)
{
	uint16_t magnitude = number < 0 ? (uint16_t)-(uint16_t)number : (uint16_t)number;
	if (number < 0)
		*to++ = '-';
	/* At least three digits, so that there is always one in front of the point. */
	return put_digits(to, magnitude, 3, 2);
}
