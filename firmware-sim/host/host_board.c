#include "host_board.h"

#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "core.h"
#include "link.h"

enum {
	RECEIVE_QUEUE_BYTES = 64,
	SENT_BYTES_MAX = 4096,
	BYTES_PER_MS = 4, /* 3.84 */
};

uint8_t host_eeprom[HOST_EEPROM_BYTES];
void (*host_ledger)(enum ledger_event event, uint32_t number, int32_t value);

static struct {
	struct identity identity;
	uint32_t now_ms;
	uint32_t random;
	uint8_t received[RECEIVE_QUEUE_BYTES];
	uint8_t received_first, received_count;
	struct instant zero_at;
	uint8_t sent[SENT_BYTES_MAX];
	uint16_t sent_count;
	uint32_t sending_until_ms;
	bool led;
	uint32_t led_switched; /* times that a command has set it, to whatever */
} host;

void host_start(uint32_t seed, uint32_t now_ms)
{
	memset(&host, 0, sizeof host);
	host.random = seed;
	host.now_ms = host.sending_until_ms = now_ms;
	identity_start(&host.identity);
	ledger_boot(host.identity.boot, host.identity.incarnation);
	core_start();
	link_start(&host.identity);
}

const struct identity *host_identity(void)
{
	return &host.identity;
}

bool host_led(void)
{
	return host.led;
}

uint32_t host_led_switched(void)
{
	return host.led_switched;
}

bool host_receive(uint8_t byte)
{
	if (host.received_count == RECEIVE_QUEUE_BYTES)
		return false;
	host.received[(host.received_first + host.received_count++) % RECEIVE_QUEUE_BYTES] = byte;
	if (byte == 0)
		host.zero_at = (struct instant){host.now_ms, 0};
	return true;
}

void host_turn(uint32_t now_ms)
{
	host.now_ms = now_ms;
	link_poll(now_ms);
}

uint16_t host_sent(uint8_t *to, uint16_t length)
{
	if (length > host.sent_count)
		length = host.sent_count;
	memcpy(to, host.sent, length);
	host.sent_count -= length;
	memmove(host.sent, host.sent + length, host.sent_count);
	return length;
}

/* --- board.h, as far as the portable part asks for it ------------------------------------------------------------- */

uint8_t board_reset_cause(void)
{
	return 1;
}

uint32_t board_now_ms(void)
{
	return host.now_ms;
}

uint32_t board_random(void)
{
	/* Marsaglia's xorshift32, which 0 would stop. */
	uint32_t x = host.random ? host.random : 1;
	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	return host.random = x;
}

static void check_eeprom(uint16_t address, uint8_t length)
{
	if (address + length > HOST_EEPROM_BYTES)
		abort();
}

void board_eeprom_read(uint16_t address, void *to, uint8_t length)
{
	check_eeprom(address, length);
	memcpy(to, host_eeprom + address, length);
}

void board_eeprom_write(uint16_t address, const void *from, uint8_t length)
{
	check_eeprom(address, length);
	memcpy(host_eeprom + address, from, length);
}

void board_led(bool on)
{
	host.led = on;
	host.led_switched++;
}

bool board_serial_read(uint8_t *byte)
{
	if (!host.received_count)
		return false;
	*byte = host.received[host.received_first];
	host.received_first = (host.received_first + 1) % RECEIVE_QUEUE_BYTES;
	host.received_count--;
	return true;
}

struct instant board_serial_zero_at(void)
{
	return host.zero_at;
}

bool board_serial_idle(void)
{
	return (int32_t)(host.now_ms - host.sending_until_ms) >= 0;
}

void board_serial_send(const uint8_t *bytes, uint8_t length)
{
	/* On the chip this would spoil what is still being sent. */
	if (!board_serial_idle() || host.sent_count + length > SENT_BYTES_MAX)
		abort();
	memcpy(host.sent + host.sent_count, bytes, length);
	host.sent_count += length;
	host.sending_until_ms = host.now_ms + 1 + length / BYTES_PER_MS;
}

/* --- ledger.h ----------------------------------------------------------------------------------------------------- */

static void tell(enum ledger_event event, uint32_t number, int32_t value)
{
	if (host_ledger)
		host_ledger(event, number, value);
}

void ledger_boot(uint32_t boot, uint32_t incarnation)
{
	tell(LEDGER_BOOT, boot, (int32_t)incarnation);
}

void ledger_taken(uint32_t sequence, int16_t centi_celsius)
{
	tell(LEDGER_TAKEN, sequence, centi_celsius);
}

void ledger_sent(uint32_t sequence)
{
	tell(LEDGER_SENT, sequence, 0);
}

void ledger_acknowledged(uint32_t sequence)
{
	tell(LEDGER_ACKNOWLEDGED, sequence, 0);
}

void ledger_dropped(uint32_t sequence)
{
	tell(LEDGER_DROPPED, sequence, 0);
}
