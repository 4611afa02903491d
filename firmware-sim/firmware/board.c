#include "board.h"

#include <avr/eeprom.h>
#include <avr/interrupt.h>
#include <avr/io.h>
#include <avr/sleep.h>
#include <avr/wdt.h>
#include <util/atomic.h>

#include "crc32.h"
#include "eeprom_layout.h"
#include "ledger.h"

#ifndef BAUD
#define BAUD 38400
#endif
#define BAUD_TOL 3
#include <util/setbaud.h>

/* Names that differ on an ATmega1284P, as on all chips with two UARTs. It also has another pattern for its 1.1 V. */
#ifdef PRR0
#define PRR PRR0
#endif
#ifndef USART_RX_vect
#define USART_RX_vect USART0_RX_vect
#define USART_UDRE_vect USART0_UDRE_vect
#endif
#ifdef __AVR_ATmega1284P__
#define REFERENCE_1V1 _BV(REFS1)
#else
#define REFERENCE_1V1 (_BV(REFS1) | _BV(REFS0))
#endif

enum {
	/* Timer 0 counts steps of 4 us (16 MHz / 64) and starts again every millisecond. */
	TIMER_STEPS_PER_MS = F_CPU / 64 / 1000,
	TIMER_STEP_US = 1000 / TIMER_STEPS_PER_MS,
	RECEIVE_QUEUE_BYTES = 64, /* a power of two: 16 ms at 38400 baud */
	/* The sum of 16 conversions has two bits more than the converter, thanks to noise. The first conversions, while
	 * the reference settles, do not count. */
	CONVERSIONS = 16,
	CONVERSIONS_TO_SETTLE = 4,
	CHANNEL_TEMPERATURE = 0,
	CHANNEL_FLOATING = 7,
	CONVERSIONS_FOR_RANDOM = 256,
};
_Static_assert(TIMER_STEPS_PER_MS <= 256 && F_CPU % 64000 == 0 && 1000 % TIMER_STEPS_PER_MS == 0,
	"timer 0 is 8 bits wide, and a millisecond a whole number of its steps, a step of microseconds");

static volatile uint32_t clock_ms;
static volatile bool something_new;

static volatile uint8_t receive_queue[RECEIVE_QUEUE_BYTES];
static volatile uint8_t receive_head, receive_tail;
static struct instant zero_at;

static const uint8_t *volatile send_from;
static volatile uint8_t send_left;

static volatile uint16_t conversion_sum;
static volatile uint8_t conversions_left;
static volatile bool measured;

static uint8_t reset_cause __attribute__((section(".noinit")));

/* Runs before anything else, even before .bss is cleared: after a watchdog reset the watchdog still runs, at 15 ms. */
void save_reset_cause(void) __attribute__((naked, used, section(".init3")));
void save_reset_cause(void)
{
	reset_cause = MCUSR;
	MCUSR = 0;
	wdt_disable();
}

uint8_t board_reset_cause(void)
{
	return reset_cause;
}

/* Lets tests reach the wrap after 49.7 days without waiting for it. */
static uint32_t clock_at_start(void)
{
	struct clock_start start;
	board_eeprom_read(EEPROM_CLOCK_START, &start, sizeof start);
	return start.crc == crc32((const uint8_t *)&start, sizeof start - sizeof start.crc) ? start.ms : 0;
}

void board_start(void)
{
	clock_ms = clock_at_start();
	PRR = _BV(PRTWI) | _BV(PRTIM2) | _BV(PRTIM1) | _BV(PRSPI);
	PORTD |= _BV(PD2);
	DIDR0 = _BV(ADC0D);

	TCCR0A = _BV(WGM01);
	OCR0A = TIMER_STEPS_PER_MS - 1;
	TIMSK0 = _BV(OCIE0A);
	TCCR0B = _BV(CS01) | _BV(CS00);

#if USE_2X
	UCSR0A = _BV(U2X0);
#else
	UCSR0A = 0;
#endif
	UCSR0C = _BV(UCSZ01) | _BV(UCSZ00);
	UBRR0H = UBRRH_VALUE;
	UBRR0L = UBRRL_VALUE;
	UCSR0B = _BV(RXCIE0) | _BV(RXEN0) | _BV(TXEN0);

	set_sleep_mode(SLEEP_MODE_IDLE);
	wdt_enable(WDTO_1S);
	sei();
}

ISR(TIMER0_COMPA_vect)
{
	clock_ms++;
	something_new = true;
}

uint32_t board_now_ms(void)
{
	uint32_t now;
	ATOMIC_BLOCK(ATOMIC_RESTORESTATE)
	now = clock_ms;
	return now;
}

/* To be called with interrupts off. */
static struct instant now_exactly(void)
{
	struct instant now = {clock_ms, 0};
	uint8_t steps = TCNT0;
	/* The timer may have started again before its interrupt was served. */
	if (TIFR0 & _BV(OCF0A)) {
		steps = TCNT0;
		now.ms++;
	}
	now.us = (uint16_t)steps * TIMER_STEP_US;
	return now;
}

void board_wait(void)
{
	wdt_reset();
	cli();
	if (!something_new) {
		sleep_enable();
		/* The instruction after sei runs before any interrupt, so none can slip in between. */
		sei();
		sleep_cpu();
		sleep_disable();
	}
	something_new = false;
	sei();
}

/* Against the internal 1.1 V: a step is 0.1 degrees of a sensor with 10 mV per degree. */
static void start_conversion(uint8_t channel, uint8_t with_interrupt)
{
	ADMUX = REFERENCE_1V1 | channel;
	ADCSRA = _BV(ADEN) | _BV(ADSC) | with_interrupt | _BV(ADPS2) | _BV(ADPS1) | _BV(ADPS0);
}

static uint16_t convert(uint8_t channel)
{
	start_conversion(channel, 0);
	while (ADCSRA & _BV(ADSC))
		;
	return ADC;
}

uint32_t board_random(void)
{
	extern uint8_t __heap_start;
	uint32_t crc = 0xFFFFFFFFUL;
	/* After power-on, the unused RAM differs from chip to chip, and somewhat from start to start. */
	for (const uint8_t *at = &__heap_start; at < (const uint8_t *)SP; at++)
		crc = crc32_update(crc, *at);
	for (uint16_t i = 0; i < CONVERSIONS_FOR_RANDOM; i++) {
		wdt_reset();
		crc = crc32_update(crc, (uint8_t)convert(CHANNEL_FLOATING));
		crc = crc32_update(crc, TCNT0);
	}
	return ~crc;
}

void board_eeprom_read(uint16_t address, void *to, uint8_t length)
{
	eeprom_read_block(to, (const void *)address, length);
}

void board_eeprom_write(uint16_t address, const void *from, uint8_t length)
{
	eeprom_update_block(from, (void *)address, length);
	eeprom_busy_wait();
}

void board_led(bool on)
{
	DDRB |= _BV(PB5);
	if (on)
		PORTB |= _BV(PB5);
	else
		PORTB &= (uint8_t)~_BV(PB5);
}

void board_measure(void)
{
	ATOMIC_BLOCK(ATOMIC_RESTORESTATE)
	{
		conversion_sum = 0;
		conversions_left = CONVERSIONS_TO_SETTLE + CONVERSIONS;
	}
	start_conversion(CHANNEL_TEMPERATURE, _BV(ADIE));
}

ISR(ADC_vect)
{
	uint16_t conversion = ADC;
	if (conversions_left <= CONVERSIONS)
		conversion_sum += conversion;
	if (--conversions_left) {
		ADCSRA |= _BV(ADSC);
	} else {
		ADCSRA = 0;
		measured = true;
		something_new = true;
	}
}

bool board_measured(int16_t *centi_celsius)
{
	if (!measured)
		return false;
	measured = false;
	/* TMP36: 500 mV at 0 degrees, and 10 mV for each degree. 1100 mV are 16 * 1024 steps. */
	*centi_celsius = (int16_t)((uint32_t)conversion_sum * 11000 / (CONVERSIONS * 1024UL)) - 5000;
	return true;
}

bool board_sampling_inhibited(void)
{
	return !(PIND & _BV(PD2));
}

ISR(USART_RX_vect)
{
	uint8_t damaged = UCSR0A & (_BV(FE0) | _BV(DOR0));
	uint8_t byte = UDR0;
	uint8_t next = (receive_head + 1) & (RECEIVE_QUEUE_BYTES - 1);
	/* If a byte is dropped here, the frame's CRC fails. The MQTT build's line has no CRC: there an answer of the
	 * modem or of the gateway is misread, and mostly the connection is given up for it. */
	if (damaged || next == receive_tail)
		return;
	if (byte == 0)
		zero_at = now_exactly();
	receive_queue[receive_head] = byte;
	receive_head = next;
	something_new = true;
}

bool board_serial_read(uint8_t *byte)
{
	uint8_t tail = receive_tail;
	if (tail == receive_head)
		return false;
	*byte = receive_queue[tail];
	receive_tail = (tail + 1) & (RECEIVE_QUEUE_BYTES - 1);
	return true;
}

struct instant board_serial_zero_at(void)
{
	struct instant at;
	ATOMIC_BLOCK(ATOMIC_RESTORESTATE)
	at = zero_at;
	return at;
}

ISR(USART_UDRE_vect)
{
	UDR0 = *send_from++;
	if (--send_left == 0) {
		UCSR0B &= (uint8_t)~_BV(UDRIE0);
		something_new = true;
	}
}

bool board_serial_idle(void)
{
	return send_left == 0;
}

void board_serial_send(const uint8_t *bytes, uint8_t length)
{
	send_from = bytes;
	send_left = length;
	UCSR0B |= _BV(UDRIE0);
}

static void through_gpior1(uint32_t number)
{
	GPIOR1 = (uint8_t)number;
	GPIOR1 = (uint8_t)(number >> 8);
	GPIOR1 = (uint8_t)(number >> 16);
	GPIOR1 = (uint8_t)(number >> 24);
}

void ledger_boot(uint32_t boot, uint32_t incarnation)
{
	through_gpior1(boot);
	through_gpior1(incarnation);
	GPIOR0 = LEDGER_BOOT;
}

static void tell(enum ledger_event event, uint32_t sequence)
{
	through_gpior1(sequence);
	GPIOR0 = event;
}

void ledger_taken(uint32_t sequence, int16_t centi_celsius)
{
	through_gpior1(sequence);
	through_gpior1((uint32_t)(int32_t)centi_celsius);
	GPIOR0 = LEDGER_TAKEN;
}

void ledger_sent(uint32_t sequence)
{
	tell(LEDGER_SENT, sequence);
}

void ledger_acknowledged(uint32_t sequence)
{
	tell(LEDGER_ACKNOWLEDGED, sequence);
}

void ledger_dropped(uint32_t sequence)
{
	tell(LEDGER_DROPPED, sequence);
}
