#include "network.h"

#include "board.h"
#include "crc32.h"

static uint8_t byte_at(uint16_t address)
{
	uint8_t byte;
	board_eeprom_read(address, &byte, 1);
	return byte;
}

static bool ends(uint16_t text, uint8_t size)
{
	return byte_at(text + size - 1) == 0;
}

bool network_valid(void)
{
	enum { CRC_AT = EEPROM_NETWORK + offsetof(struct network, crc) };
	uint32_t crc = 0xFFFFFFFFUL;
	for (uint16_t at = EEPROM_NETWORK; at < CRC_AT; at++)
		crc = crc32_update(crc, byte_at(at));
	uint32_t expected;
	board_eeprom_read(CRC_AT, &expected, sizeof expected);
	return ~crc == expected && byte_at(EEPROM_NETWORK) == NETWORK_VERSION &&
	       ends(NETWORK_HOST, sizeof((struct network *)0)->host) &&
	       ends(NETWORK_SSID, sizeof((struct network *)0)->ssid) &&
	       ends(NETWORK_PASSPHRASE, sizeof((struct network *)0)->passphrase) &&
	       ends(NETWORK_SECRET, sizeof((struct network *)0)->secret);
}

uint16_t network_port(void)
{
	uint16_t port;
	board_eeprom_read(EEPROM_NETWORK + offsetof(struct network, port), &port, sizeof port);
	return port;
}

uint8_t *network_put(uint8_t *to, uint16_t text)
{
	for (uint8_t byte; (byte = byte_at(text)); text++)
		*to++ = byte;
	return to;
}

uint8_t *network_put_quoted(uint8_t *to, uint16_t text)
{
	*to++ = '"';
	for (uint8_t byte; (byte = byte_at(text)); text++) {
		if (byte == '"' || byte == ',' || byte == '\\')
			*to++ = '\\';
		*to++ = byte;
	}
	*to++ = '"';
	return to;
}
