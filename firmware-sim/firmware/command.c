#include "command.h"

#include <string.h>

#include "board.h"

bool command_do(const uint8_t *payload, uint8_t length)
{
	static const char led[] = "led=";
	enum { NAME_BYTES = sizeof led - 1 };
	if (length != NAME_BYTES + 1 || memcmp(payload, led, NAME_BYTES) != 0)
		return false;
	if (payload[NAME_BYTES] != '0' && payload[NAME_BYTES] != '1')
		return false;
	board_led(payload[NAME_BYTES] == '1');
	return true;
}
