#include "line.h"

#include <math.h>

#include <simavr/avr_uart.h>
#include <simavr/sim_time.h>

#include "chip.h"
#include "pace.h"
#include "system.h"
#include "uart_bits.h"

enum { BITS_PER_BYTE = 10 };

/* A UART samples a byte's last bit right as long as the speeds differ by less than half a bit in ten. */
static const double mismatch_from = 0.04;

static struct {
	avr_t *avr;
	avr_irq_t *uart_input;
	bool uart_full;
	uint64_t random;
	double noise;
	uint32_t to_lose;
	double far_baud, forced_baud;

	uint8_t to_chip[LINE_BYTES_MAX]; /* a ring */
	size_t to_chip_first, to_chip_count;
	struct timed_byte from_chip[LINE_BYTES_MAX];
	size_t from_chip_count;
} line;

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

/* Bytes reach the chip no faster than the line's speed allows. */
static avr_cycle_count_t feed_byte(avr_t *avr, avr_cycle_count_t when, void *unused)
{
	(void)avr;
	(void)unused;
	if (!line.uart_full && line.to_chip_count) {
		uint8_t byte = line.to_chip[line.to_chip_first];
		line.to_chip_first = (line.to_chip_first + 1) % LINE_BYTES_MAX;
		line.to_chip_count--;
		avr_raise_irq(line.uart_input, byte);
	}
	return line.to_chip_count ? when + (avr_cycle_count_t)(BITS_PER_BYTE * CHIP_HZ / chip_baud()) : 0;
}

static void start_feeding(void)
{
	if (line.to_chip_count && avr_cycle_timer_status(line.avr, feed_byte, NULL) == 0)
		avr_cycle_timer_register(line.avr, (avr_cycle_count_t)(BITS_PER_BYTE * CHIP_HZ / chip_baud()),
					 feed_byte, NULL);
}

size_t line_room(void)
{
	return LINE_BYTES_MAX - line.to_chip_count;
}

void line_to_chip(const uint8_t *bytes, size_t count)
{
	uint8_t misread[LINE_BYTES_MAX];
	if (speeds_differ()) {
		count = uart_hear(bytes, count, far_baud(), true_chip_baud(), misread, LINE_BYTES_MAX);
		bytes = misread;
	}
	for (size_t i = 0; i < count && line_room() > 0 && chip_is_on(); i++) {
		line.to_chip[(line.to_chip_first + line.to_chip_count) % LINE_BYTES_MAX] = with_noise(bytes[i]);
		line.to_chip_count++;
	}
	start_feeding();
}

bool line_busy(void)
{
	return line.to_chip_count > 0;
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
	/* What was on its way came while nobody listened; simavr has forgotten the timer that fed it. */
	line.uart_full = false;
	line.to_chip_count = 0;
}

/* --- From the chip ------------------------------------------------------------------------------------------------- */

static void chip_sent(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	if (line.from_chip_count < LINE_BYTES_MAX)
		line.from_chip[line.from_chip_count++] = (struct timed_byte){chip_us(), (uint8_t)value};
}

static void misread_from_chip(void)
{
	uint8_t sent[LINE_BYTES_MAX], heard[LINE_BYTES_MAX];
	for (size_t i = 0; i < line.from_chip_count; i++)
		sent[i] = line.from_chip[i].byte;
	uint64_t at_us = line.from_chip[line.from_chip_count - 1].at_us;
	line.from_chip_count =
		uart_hear(sent, line.from_chip_count, true_chip_baud(), far_baud(), heard, LINE_BYTES_MAX);
	for (size_t i = 0; i < line.from_chip_count; i++)
		line.from_chip[i] = (struct timed_byte){at_us, heard[i]};
}

size_t line_from_chip(struct timed_byte *heard)
{
	if (line.from_chip_count && speeds_differ())
		misread_from_chip();
	size_t count = 0;
	for (size_t i = 0; i < line.from_chip_count; i++) {
		if (line.to_lose) {
			line.to_lose--;
			continue;
		}
		heard[count] = line.from_chip[i];
		heard[count].byte = with_noise(heard[count].byte);
		count++;
	}
	line.from_chip_count = 0;
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
