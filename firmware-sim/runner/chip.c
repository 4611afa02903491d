#include "chip.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <simavr/avr_extint.h>
#include <simavr/avr_ioport.h>
#include <simavr/avr_uart.h>
#include <simavr/sim_elf.h>

#include "../firmware/ledger.h"
#include "analogue.h"
#include "eeprom.h"
#include "fault_log.h"
#include "ledger_file.h"
#include "system.h"

enum {
	JUMPER_PIN = 2, /* of port D */
	LED_PIN = 5,    /* of port B */
	RAM_FIRST = 0x100,
	RAM_LAST = 0x8FF,

	/* Data addresses of registers. */
	GPIOR0_ADDRESS = 0x3E,
	GPIOR1_ADDRESS = 0x4A,
	MCUSR_ADDRESS = 0x54,
	UCSR0A_ADDRESS = 0xC0,
	UBRR0L_ADDRESS = 0xC4,
	UBRR0H_ADDRESS = 0xC5,
	U2X0_MASK = 0x02,
	/* Where the linker puts data addresses in an ELF file. */
	ELF_DATA_OFFSET = 0x800000,
};

static struct {
	avr_t *avr;
	void (*on_reset)(void);
	void (*reset_of_simavr)(avr_t *avr);
	bool starting;
	bool inhibited;

	bool off;
	uint64_t off_cycles; /* how long it still stays off */
	uint64_t off_cycles_passed;
	enum reset_cause cause;
	uint32_t write_off_ms;

	uint8_t report[8]; /* the last bytes that went through GPIOR1 */
	uint8_t report_at;

	uint16_t stack_lowest; /* address that it may reach */
	uint16_t stack_reached;
	uint8_t painted[RAM_LAST + 1];
} chip;

/* --- Stack --------------------------------------------------------------------------------------------------------- */

struct stack chip_stack(void)
{
	uint16_t at = chip.stack_lowest;
	while (at < chip.stack_reached && chip.avr->data[at] == chip.painted[at])
		at++;
	chip.stack_reached = at;
	return (struct stack){(uint16_t)(RAM_LAST + 1 - at), (uint16_t)(RAM_LAST + 1 - chip.stack_lowest)};
}

/* What power-on leaves in RAM is random, and where it is still as it was, the stack never came. */
static void paint_ram(void)
{
	fill_random(chip.avr->data + RAM_FIRST, RAM_LAST + 1 - RAM_FIRST);
	memcpy(chip.painted, chip.avr->data, sizeof chip.painted);
}

static uint16_t find_end_of_variables(const elf_firmware_t *firmware)
{
	for (uint32_t i = 0; i < firmware->symbolcount; i++)
		if (strcmp(firmware->symbol[i]->symbol, "_end") == 0)
			return (uint16_t)(firmware->symbol[i]->addr - ELF_DATA_OFFSET);
	fail("the firmware has no symbol _end, so the stack's use cannot be measured; link it without -s");
}

/* --- Jumper -------------------------------------------------------------------------------------------------------- */

/* A set jumper pulls its pin down. The level is changed twice, for simavr passes on changes only, and forgets the pins'
 * levels when the chip is reset. */
void chip_inhibit(bool inhibited)
{
	avr_irq_t *pin = avr_io_getirq(chip.avr, AVR_IOCTL_IOPORT_GETIRQ('D'), JUMPER_PIN);
	chip.inhibited = inhibited;
	/* The pin is INT0's too: for a low level there simavr would look at every single cycle, sleeping chip or not. */
	avr_extint_set_strict_lvl_trig(chip.avr, 0, 0);
	avr_raise_irq(pin, inhibited);
	avr_raise_irq(pin, !inhibited);
}

bool chip_inhibited(void)
{
	return chip.inhibited;
}

/* --- LED ----------------------------------------------------------------------------------------------------------- */

static void led_changed(avr_irq_t *irq, uint32_t level, void *unused)
{
	(void)irq;
	(void)unused;
	fault_log_led(level);
}

/* --- Reset and power ----------------------------------------------------------------------------------------------- */

bool chip_is_on(void)
{
	return !chip.off;
}

void chip_on_reset(void (*notify)(void))
{
	chip.on_reset = notify;
}

/* simavr calls this at every reset: at ours, and at its watchdog's. */
static void was_reset(avr_t *avr)
{
	chip.reset_of_simavr(avr);
	analogue_measured_us(); /* a measurement under way is given up */
	if (!chip.starting)
		fault_log("watchdog");
	if (chip.on_reset)
		chip.on_reset();
}

static void start(enum reset_cause cause)
{
	chip.starting = true;
	avr_reset(chip.avr);
	chip.starting = false;
	/* simavr leaves no cause, or, once the watchdog fired, still the watchdog's. */
	chip.avr->data[MCUSR_ADDRESS] = cause;
	chip_inhibit(chip.inhibited);
}

void chip_reset(void)
{
	if (!chip.off)
		start(EXTERNAL);
}

void chip_power_off(uint32_t off_ms, enum reset_cause cause)
{
	chip_stack();
	chip.off = true;
	chip.off_cycles = (uint64_t)off_ms * (CHIP_HZ / 1000);
	chip.cause = cause;
}

static void power_on(void)
{
	chip.off = false;
	paint_ram();
	start(chip.cause);
}

static void failed_in_write(void)
{
	fault_log("brown-out in the middle of an EEPROM write");
	chip_power_off(chip.write_off_ms, BROWN_OUT);
}

void chip_power_off_in_write(uint32_t off_ms, unsigned written_well)
{
	chip.write_off_ms = off_ms;
	chip_power_off(off_ms, POWER_ON);
	eeprom_fail_write(written_well, failed_in_write);
}

void chip_erase(bool all)
{
	eeprom_erase(all);
	chip_reset();
}

/* --- Ledger -------------------------------------------------------------------------------------------------------- */

static void report_byte(avr_t *avr, avr_io_addr_t address, uint8_t value, void *unused)
{
	(void)unused;
	avr->data[address] = value;
	chip.report[chip.report_at++ % sizeof chip.report] = value;
}

/* The number that ends `back` bytes before the last one. */
static uint32_t reported(uint8_t back)
{
	uint32_t number = 0;
	for (uint8_t i = 0; i < 4; i++)
		number = number << 8 | chip.report[(uint8_t)(chip.report_at - 1 - back - i) % sizeof chip.report];
	return number;
}

static void report_boot(uint32_t boot, uint32_t incarnation)
{
	if (eeprom_fail_write_no_more())
		fault_log("no brown-out: the EEPROM was written with fewer bytes than that");
	/* On disk before the board can say who it is: a boot must never be counted twice. */
	eeprom_save();
	chip_inhibit(chip.inhibited);
	char name[DEVICE_BYTES_MAX + 1];
	eeprom_device_name(name);
	if (!ledger_file_boot(name, boot, incarnation))
		fail("the ledger already has boot %" PRIu32 "-%08" PRIx32 " of %s: the EEPROM file is an older copy; "
		     "delete the EEPROM file or the ledger",
		     boot, incarnation, name);
}

static void report_event(avr_t *avr, avr_io_addr_t address, uint8_t event, void *unused)
{
	(void)unused;
	avr->data[address] = event;
	switch (event) {
	case LEDGER_BOOT:
		report_boot(reported(4), reported(0));
		break;
	case LEDGER_TAKEN:
		ledger_file_taken(reported(4), (int32_t)reported(0), analogue_measured_us());
		break;
	case LEDGER_SENT:
		ledger_file_sent();
		break;
	case LEDGER_ACKNOWLEDGED:
		ledger_file_acknowledged(reported(0));
		break;
	case LEDGER_DROPPED:
		ledger_file_dropped(reported(0));
		break;
	}
}

/* --- Time ---------------------------------------------------------------------------------------------------------- */

static void do_not_sleep(avr_t *avr, avr_cycle_count_t cycles)
{
	/* The pace is kept from outside, between two calls of chip_run. */
	(void)avr;
	(void)cycles;
}

static avr_cycle_count_t end_of_slice(avr_t *avr, avr_cycle_count_t when, void *unused)
{
	/* Being a timer is enough: a sleeping chip's time does not run past it. */
	(void)avr;
	(void)when;
	(void)unused;
	return 0;
}

/* Gives how many cycles passed until all were over, or the power failed. */
static uint64_t run(uint64_t cycles)
{
	avr_t *avr = chip.avr;
	avr_cycle_count_t first = avr->cycle, last = first + cycles;
	avr_cycle_timer_register(avr, cycles, end_of_slice, NULL);
	while (avr->cycle < last && !chip.off) {
		int state = avr_run(avr);
		if (state == cpu_Done || state == cpu_Crashed)
			fail("the firmware %s at program address 0x%04x", state == cpu_Done ? "ended" : "crashed",
			     avr->pc);
	}
	return avr->cycle - first;
}

uint64_t chip_run(uint64_t cycles)
{
	uint64_t passed = 0;
	while (passed < cycles) {
		if (!chip.off) {
			passed += run(cycles - passed);
			continue;
		}
		uint64_t off = cycles - passed < chip.off_cycles ? cycles - passed : chip.off_cycles;
		chip.off_cycles -= off;
		chip.off_cycles_passed += off;
		passed += off;
		if (chip.off_cycles == 0)
			power_on();
	}
	return passed;
}

uint64_t chip_us(void)
{
	return chip_cycle() / (CHIP_HZ / 1000000);
}

uint64_t chip_cycle(void)
{
	return chip.avr->cycle + chip.off_cycles_passed;
}

double chip_baud(void)
{
	const uint8_t *data = chip.avr->data;
	uint32_t divisor = 1 + (data[UBRR0L_ADDRESS] | (data[UBRR0H_ADDRESS] & 0x0Fu) << 8);
	return (double)CHIP_HZ / (divisor * (data[UCSR0A_ADDRESS] & U2X0_MASK ? 8 : 16));
}

/* --- Making -------------------------------------------------------------------------------------------------------- */

static void only_errors(avr_t *avr, const int level, const char *format, va_list arguments)
{
	(void)avr;
	if (level <= LOG_ERROR)
		vfprintf(stderr, format, arguments);
}

avr_t *chip_make(const char *elf_path, const char *eeprom_path, uint64_t seed)
{
	static elf_firmware_t firmware;
	avr_global_logger_set(only_errors);
	if (elf_read_firmware(elf_path, &firmware) != 0)
		fail("cannot read the firmware %s; build it with make", elf_path);
	avr_t *avr = avr_make_mcu_by_name("atmega328p");
	if (!avr)
		fail("this simavr knows no atmega328p");
	chip.avr = avr;
	avr_init(avr);
	avr->frequency = firmware.frequency = CHIP_HZ;
	avr_load_firmware(avr, &firmware);
	avr->vcc = avr->avcc = avr->aref = 5000;
	avr->sleep = do_not_sleep;
	chip.reset_of_simavr = avr->reset;
	avr->reset = was_reset;

	uint32_t silent = 0;
	avr_ioctl(avr, AVR_IOCTL_UART_SET_FLAGS('0'), &silent);
	avr_register_io_write(avr, GPIOR1_ADDRESS, report_byte, NULL);
	avr_register_io_write(avr, GPIOR0_ADDRESS, report_event, NULL);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_IOPORT_GETIRQ('B'), LED_PIN), led_changed, NULL);
	analogue_connect(avr, seed, chip_us);
	eeprom_load(avr, eeprom_path);

	chip.stack_lowest = find_end_of_variables(&firmware);
	chip.stack_reached = RAM_LAST;
	chip.cause = POWER_ON;
	power_on();
	return avr;
}
