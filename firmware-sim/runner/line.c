#include "line.h"

#include <math.h>
#include <string.h>

#include <simavr/avr_uart.h>
#include <simavr/sim_time.h>

#include "chip.h"
#include "pace.h"
#include "system.h"
#include "uart_bits.h"

enum { BITS_PER_BYTE = 10, CYCLES_PER_US = CHIP_HZ / 1000000 };

/* A UART samples a byte's last bit right as long as the speeds differ by less than half a bit in ten. */
static const double mismatch_from = 0.04;

struct waiting_byte {
	uint64_t since_us; /* CLOCK_BOOTTIME */
	uint8_t byte;
};

static struct {
	avr_t *avr;
	avr_irq_t *uart_input;
	bool uart_full;
	uint64_t random;
	double noise;
	uint32_t to_lose;
	double far_baud, forced_baud;

	struct waiting_byte to_chip[LINE_BYTES_MAX]; /* a ring */
	size_t to_chip_first, to_chip_count;
	struct timed_byte from_chip[LINE_BYTES_MAX];
	size_t from_chip_count;
	uint64_t carries_until_cycle; /* what the chip has sent so far */
} line;

static uint64_t cycles_per_byte(void)
{
	return (uint64_t)(BITS_PER_BYTE * CHIP_HZ / chip_baud());
}

static double true_chip_baud(void)
{
	return chip_baud() * (1 + pace_ppm() / 1e6);
}

static double far_baud(void)
{
	return line.forced_baud > 0 ? line.forced_baud : line.far_baud;
}

static bool speeds_differ(void)
{
	double chip = true_chip_baud();
	return far_baud() > 0 && fabs(far_baud() - chip) > mismatch_from * chip;
}

static uint8_t with_noise(uint8_t byte)
{
	if (line.noise > 0 && next_unit(&line.random) < line.noise)
		byte ^= (uint8_t)(1u << (unsigned)(8 * next_unit(&line.random)));
	return byte;
}

/* --- To the chip --------------------------------------------------------------------------------------------------- */

/* For how many cycles the line still carries the byte that is next, at the least; 0 where it has arrived. */
static uint64_t still_under_way(void)
{
	double began_us = pace_time_us(chip_cycle() - cycles_per_byte());
	double early_us = (double)line.to_chip[line.to_chip_first].since_us - began_us;
	return early_us > 0 ? 1 + (uint64_t)(early_us * (CHIP_HZ / 1e6)) : 0;
}

/* Bytes reach the chip no faster than the line's speed allows. */
static avr_cycle_count_t feed_byte(avr_t *avr, avr_cycle_count_t when, void *unused)
{
	(void)avr;
	(void)unused;
	if (!line.uart_full && line.to_chip_count) {
		uint64_t early_cycles = still_under_way();
		if (early_cycles)
			return when + early_cycles;
		uint8_t byte = line.to_chip[line.to_chip_first].byte;
		line.to_chip_first = (line.to_chip_first + 1) % LINE_BYTES_MAX;
		line.to_chip_count--;
		avr_raise_irq(line.uart_input, byte);
	}
	return line.to_chip_count ? when + cycles_per_byte() : 0;
}

static void start_feeding(void)
{
	if (line.to_chip_count && avr_cycle_timer_status(line.avr, feed_byte, NULL) == 0)
		avr_cycle_timer_register(line.avr, cycles_per_byte(), feed_byte, NULL);
}

size_t line_room(void)
{
	return LINE_BYTES_MAX - line.to_chip_count;
}

void line_to_chip(const uint8_t *bytes, size_t count, uint64_t since_us)
{
	uint8_t misread[LINE_BYTES_MAX];
	if (speeds_differ()) {
		count = uart_hear(bytes, count, far_baud(), true_chip_baud(), misread, LINE_BYTES_MAX);
		bytes = misread;
	}
	for (size_t i = 0; i < count && line_room() > 0 && chip_is_on(); i++) {
		line.to_chip[(line.to_chip_first + line.to_chip_count) % LINE_BYTES_MAX] =
			(struct waiting_byte){since_us, with_noise(bytes[i])};
		line.to_chip_count++;
	}
	start_feeding();
}

/* How many of the bytes from the chip the line has carried by now. */
static size_t whole_bytes(void)
{
	size_t count = 0;
	while (count < line.from_chip_count && line.from_chip[count].at_us <= chip_us())
		count++;
	return count;
}

bool line_busy(void)
{
	return line.to_chip_count > 0 || line.from_chip_count > 0;
}

static void uart_xon(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)value;
	(void)unused;
	line.uart_full = false;
}

static void uart_xoff(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	if (value)
		line.uart_full = true;
}

void line_chip_was_reset(void)
{
	/* What was on its way came while nobody listened; simavr has forgotten the timer that fed it. What the chip was
	 * sending is cut off. */
	line.uart_full = false;
	line.to_chip_count = 0;
	line.from_chip_count = whole_bytes();
	line.carries_until_cycle = 0;
}

/* --- From the chip ------------------------------------------------------------------------------------------------- */

static void chip_sent(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	/* simavr tells of a byte when it is written to the UART, which still has one or two to shift out. */
	uint64_t now = chip_cycle();
	uint64_t begins = line.carries_until_cycle > now ? line.carries_until_cycle : now;
	line.carries_until_cycle = begins + cycles_per_byte();
	uint64_t at_us = (line.carries_until_cycle + CYCLES_PER_US - 1) / CYCLES_PER_US;
	if (line.from_chip_count < LINE_BYTES_MAX)
		line.from_chip[line.from_chip_count++] = (struct timed_byte){at_us, (uint8_t)value};
}

static size_t misread(const struct timed_byte *bytes, size_t count, struct timed_byte *heard)
{
	uint8_t sent[LINE_BYTES_MAX], got[LINE_BYTES_MAX];
	for (size_t i = 0; i < count; i++)
		sent[i] = bytes[i].byte;
	uint64_t at_us = bytes[count - 1].at_us;
	count = uart_hear(sent, count, true_chip_baud(), far_baud(), got, LINE_BYTES_MAX);
	for (size_t i = 0; i < count; i++)
		heard[i] = (struct timed_byte){at_us, got[i]};
	return count;
}

size_t line_from_chip(struct timed_byte *heard)
{
	size_t carried = whole_bytes(), count = carried;
	if (carried && speeds_differ())
		count = misread(line.from_chip, carried, heard);
	else
		memcpy(heard, line.from_chip, carried * sizeof *heard);
	line.from_chip_count -= carried;
	memmove(line.from_chip, line.from_chip + carried, line.from_chip_count * sizeof *heard);
	size_t lost = line.to_lose < count ? line.to_lose : count;
	line.to_lose -= (uint32_t)lost;
	count -= lost;
	memmove(heard, heard + lost, count * sizeof *heard);
	for (size_t i = 0; i < count; i++)
		heard[i].byte = with_noise(heard[i].byte);
	return count;
}

/* --- Faults and making --------------------------------------------------------------------------------------------- */

void line_set_noise(double share)
{
	line.noise = share;
}

void line_lose(uint32_t count)
{
	line.to_lose += count;
}

void line_set_far_baud(double baud)
{
	line.far_baud = baud;
}

void line_force_far_baud(double baud)
{
	line.forced_baud = baud;
}

void line_connect(avr_t *avr, uint64_t seed)
{
	line.avr = avr;
	line.random = seed;
	line.uart_input = avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_INPUT);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUTPUT), chip_sent, NULL);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUT_XON), uart_xon, NULL);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUT_XOFF), uart_xoff, NULL);
}
