/* Execute the sensor's firmware in simavr, in real time, with its serial line on a pseudo-terminal.
 *
 * The board around the chip: a TMP36-like sensor on ADC0, a floating pin ADC7, a jumper on D2, an EEPROM that lives in a
 * file, and a serial adapter: bytes that nobody listens to are lost, as on a real line. */
#define _GNU_SOURCE /* ppoll */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include <simavr/avr_adc.h>
#include <simavr/avr_eeprom.h>
#include <simavr/avr_ioport.h>
#include <simavr/avr_uart.h>
#include <simavr/sim_avr.h>
#include <simavr/sim_elf.h>
#include <simavr/sim_time.h>

#include "../firmware/eeprom_layout.h"
#include "../firmware/ledger.h"
#include "ledger_file.h"

enum {
	FREQUENCY_HZ = 16000000,
	EEPROM_BYTES = 1024,
	FLOATING_CHANNEL = 7,
	REFERENCE_MV = 1100,
	JUMPER_PIN = 2,

	/* How long the chip may lag behind while nothing moves on the line, and while something does. */
	IDLE_SLICE_US = 4000,
	BUSY_SLICE_US = 1000,
	BUSY_AFTER_BYTE_US = 20000,
	/* After a longer standstill (a suspended machine) the chip does not hurry after the lost time. */
	LAG_US_MAX = 2000000,
	SAVE_INTERVAL_US = 500000,

	LINE_BYTES_MAX = 4096,

	/* Data addresses of the registers that the firmware reports through, and of the UART's speed. */
	GPIOR0_ADDRESS = 0x3E,
	GPIOR1_ADDRESS = 0x4A,
	UCSR0A_ADDRESS = 0xC0,
	UBRR0L_ADDRESS = 0xC4,
	UBRR0H_ADDRESS = 0xC5,
	U2X0_MASK = 0x02,
};

static volatile sig_atomic_t stop_asked, inhibit_asked;

static struct {
	avr_t *avr;
	const char *eeprom_path;
	uint8_t *eeprom; /* the chip's own */
	uint8_t eeprom_saved[EEPROM_BYTES];
	uint64_t seed;
	uint64_t started_us;
	bool inhibited;

	uint8_t report[8]; /* the last bytes that went through GPIOR1 */
	uint8_t report_at;

	int master;
	avr_irq_t *uart_input;
	bool uart_full;
	uint8_t to_chip[LINE_BYTES_MAX];
	size_t to_chip_first, to_chip_count;
	uint8_t from_chip[LINE_BYTES_MAX];
	size_t from_chip_count;
	uint64_t line_used_us;
} board;

static __attribute__((format(printf, 1, 2), noreturn)) void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	fputs("avr-runner: ", stderr);
	vfprintf(stderr, format, arguments);
	fputc('\n', stderr);
	va_end(arguments);
	exit(1);
}

static uint64_t now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* --- EEPROM -------------------------------------------------------------------------------------------------------- */

static void eeprom_load(void)
{
	/* With a null pointer simavr gives its own memory; the call's result is not a success code in every version. */
	avr_eeprom_desc_t whole = {.ee = NULL, .offset = 0, .size = 1};
	avr_ioctl(board.avr, AVR_IOCTL_EEPROM_GET, &whole);
	if (!whole.ee)
		fail("this simavr gives no access to the EEPROM");
	board.eeprom = whole.ee;
	memset(board.eeprom, 0xFF, EEPROM_BYTES);
	FILE *file = fopen(board.eeprom_path, "rb");
	if (file) {
		size_t got = fread(board.eeprom, 1, EEPROM_BYTES, file);
		if (got != EEPROM_BYTES)
			fail("%s has %zu bytes where an ATmega328P's EEPROM has %d; delete it to start with an erased one",
			     board.eeprom_path, got, EEPROM_BYTES);
		fclose(file);
		memcpy(board.eeprom_saved, board.eeprom, EEPROM_BYTES);
	} else if (errno != ENOENT) {
		fail("cannot read the EEPROM file %s: %s", board.eeprom_path, strerror(errno));
	}
}

static void eeprom_save(void)
{
	if (memcmp(board.eeprom, board.eeprom_saved, EEPROM_BYTES) == 0)
		return;
	char path_new[4096];
	snprintf(path_new, sizeof path_new, "%s.new", board.eeprom_path);
	FILE *file = fopen(path_new, "wb");
	if (!file)
		fail("cannot write the EEPROM file %s: %s", path_new, strerror(errno));
	bool written = fwrite(board.eeprom, 1, EEPROM_BYTES, file) == EEPROM_BYTES;
	written &= fclose(file) == 0;
	if (!written || rename(path_new, board.eeprom_path) != 0)
		fail("cannot write the EEPROM file %s: %s", board.eeprom_path, strerror(errno));
	memcpy(board.eeprom_saved, board.eeprom, EEPROM_BYTES);
}

static void device_name(char name[DEVICE_BYTES_MAX + 1])
{
	struct configuration configuration;
	memcpy(&configuration, board.eeprom + EEPROM_CONFIGURATION, sizeof configuration);
	strcpy(name, "unprovisioned");
	if (configuration.version != CONFIGURATION_VERSION || configuration.device_length > DEVICE_BYTES_MAX)
		return;
	for (uint8_t i = 0; i < configuration.device_length; i++)
		if (configuration.device[i] < ' ' || configuration.device[i] == '"' || configuration.device[i] == '\\')
			return;
	memcpy(name, configuration.device, configuration.device_length);
	name[configuration.device_length] = 0;
}

/* --- Jumper -------------------------------------------------------------------------------------------------------- */

/* A set jumper pulls its pin down. The level is changed twice, for simavr passes on changes only, and forgets the pins'
 * levels when the chip is reset. */
static void set_jumper(bool inhibited)
{
	avr_irq_t *pin = avr_io_getirq(board.avr, AVR_IOCTL_IOPORT_GETIRQ('D'), JUMPER_PIN);
	board.inhibited = inhibited;
	avr_raise_irq(pin, inhibited);
	avr_raise_irq(pin, !inhibited);
}

/* --- Ledger -------------------------------------------------------------------------------------------------------- */

static void report_byte(avr_t *avr, avr_io_addr_t address, uint8_t value, void *unused)
{
	(void)unused;
	avr->data[address] = value;
	board.report[board.report_at++ % sizeof board.report] = value;
}

/* The number that ends `back` bytes before the last one. */
static uint32_t reported(uint8_t back)
{
	uint32_t number = 0;
	for (uint8_t i = 0; i < 4; i++)
		number = number << 8 | board.report[(uint8_t)(board.report_at - 1 - back - i) % sizeof board.report];
	return number;
}

static void report_event(avr_t *avr, avr_io_addr_t address, uint8_t event, void *unused)
{
	(void)unused;
	avr->data[address] = event;
	switch (event) {
	case LEDGER_BOOT: {
		/* On disk before the board can say who it is: a boot must never be counted twice. */
		eeprom_save();
		set_jumper(board.inhibited);
		char name[DEVICE_BYTES_MAX + 1];
		device_name(name);
		if (!ledger_file_boot(name, reported(4), reported(0)))
			fail("the ledger already has boot %" PRIu32 "-%08" PRIx32 " of %s: the EEPROM file is an older "
			     "copy; delete the EEPROM file or the ledger",
			     reported(4), reported(0), name);
		break;
	}
	case LEDGER_TAKEN:
		ledger_file_taken();
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

/* --- Analogue inputs ----------------------------------------------------------------------------------------------- */

static double unit(uint64_t *state)
{
	/* splitmix64 */
	uint64_t z = *state += 0x9E3779B97F4A7C15u;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

/* A room's temperature: a slow and a quicker swing about a mean, all three by the seed, and the converter's noise. */
static uint32_t temperature_mv(double seconds)
{
	uint64_t state = board.seed;
	double mean = 17.0 + 8.0 * unit(&state);
	double slow = sin(2 * M_PI * (seconds / (240.0 + 120.0 * unit(&state)) + unit(&state)));
	double quick = sin(2 * M_PI * (seconds / (20.0 + 20.0 * unit(&state)) + unit(&state)));
	static uint64_t noise;
	double celsius = mean + 2.0 * slow + 0.3 * quick + 0.3 * (unit(&noise) - 0.5);
	return (uint32_t)(500.0 + 10.0 * celsius + 0.5);
}

static void conversion_starts(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	union {
		avr_adc_mux_t mux;
		uint32_t value;
	} input = {.value = value};
	if (input.mux.kind != ADC_MUX_SINGLE)
		return;
	uint32_t mv = 0;
	if (input.mux.src == FLOATING_CHANNEL) {
		uint16_t noise;
		/* The operating system's own, whatever the seed: an erased chip must not repeat an incarnation. */
		if (getrandom(&noise, sizeof noise, 0) == sizeof noise)
			mv = noise % REFERENCE_MV;
	} else if (input.mux.src == 0) {
		mv = temperature_mv((double)board.avr->cycle / FREQUENCY_HZ);
	}
	avr_raise_irq(avr_io_getirq(board.avr, AVR_IOCTL_ADC_GETIRQ, ADC_IRQ_ADC0 + input.mux.src), mv);
}

/* --- Serial line --------------------------------------------------------------------------------------------------- */

static void chip_sent(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	if (board.from_chip_count < sizeof board.from_chip)
		board.from_chip[board.from_chip_count++] = (uint8_t)value;
}

static void uart_xon(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)value;
	(void)unused;
	board.uart_full = false;
}

static void uart_xoff(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	if (value)
		board.uart_full = true;
}

static avr_cycle_count_t byte_cycles(void)
{
	const uint8_t *data = board.avr->data;
	uint32_t divisor = 1 + (data[UBRR0L_ADDRESS] | (data[UBRR0H_ADDRESS] & 0x0Fu) << 8);
	return 10 * divisor * (data[UCSR0A_ADDRESS] & U2X0_MASK ? 8 : 16);
}

/* Bytes reach the chip no faster than the line's speed allows. */
static avr_cycle_count_t feed_byte(avr_t *avr, avr_cycle_count_t when, void *unused)
{
	(void)avr;
	(void)unused;
	if (!board.uart_full) {
		uint8_t byte = board.to_chip[board.to_chip_first];
		board.to_chip_first = (board.to_chip_first + 1) % sizeof board.to_chip;
		board.to_chip_count--;
		avr_raise_irq(board.uart_input, byte);
	}
	return board.to_chip_count ? when + byte_cycles() : 0;
}

static void line_open(const char *link_path)
{
	int slave;
	char name[128];
	if (openpty(&board.master, &slave, name, NULL, NULL) != 0)
		fail("cannot open a pseudo-terminal: %s", strerror(errno));
	struct termios raw;
	tcgetattr(slave, &raw);
	cfmakeraw(&raw);
	tcsetattr(slave, TCSANOW, &raw);
	close(slave);
	fcntl(board.master, F_SETFL, O_NONBLOCK);
	fcntl(board.master, F_SETFD, FD_CLOEXEC);
	char link_new[4096];
	snprintf(link_new, sizeof link_new, "%s.new", link_path);
	unlink(link_new);
	if (symlink(name, link_new) != 0 || rename(link_new, link_path) != 0)
		fail("cannot make the link %s: %s", link_path, strerror(errno));
}

static bool somebody_listens(void)
{
	struct pollfd line = {.fd = board.master, .events = 0};
	return poll(&line, 1, 0) == 0 || !(line.revents & POLLHUP);
}

/* Move bytes between the pseudo-terminal and the chip's queues. */
static void line_exchange(uint64_t at_us)
{
	bool listened = somebody_listens();
	if (board.from_chip_count) {
		board.line_used_us = at_us;
		/* Without a listener, or with one that does not read, bytes are lost: a real line does not wait. */
		if (listened && write(board.master, board.from_chip, board.from_chip_count) < 0 && errno != EAGAIN &&
		    errno != EIO)
			fail("cannot write to the pseudo-terminal: %s", strerror(errno));
		board.from_chip_count = 0;
	}
	while (listened && board.to_chip_count < sizeof board.to_chip) {
		size_t end = (board.to_chip_first + board.to_chip_count) % sizeof board.to_chip;
		size_t room = end < board.to_chip_first ? board.to_chip_first - end : sizeof board.to_chip - end;
		ssize_t got = read(board.master, board.to_chip + end, room);
		if (got <= 0)
			break;
		board.to_chip_count += (size_t)got;
		board.line_used_us = at_us;
	}
	if (board.to_chip_count && avr_cycle_timer_status(board.avr, feed_byte, NULL) == 0)
		avr_cycle_timer_register(board.avr, byte_cycles(), feed_byte, NULL);
}

/* --- Time ---------------------------------------------------------------------------------------------------------- */

static void do_not_sleep(avr_t *avr, avr_cycle_count_t cycles)
{
	/* The pace is kept between slices, in wait_for_line. */
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

static void run_until(avr_cycle_count_t cycle)
{
	avr_t *avr = board.avr;
	if (cycle <= avr->cycle)
		return;
	avr_cycle_timer_register(avr, cycle - avr->cycle, end_of_slice, NULL);
	while (avr->cycle < cycle) {
		int state = avr_run(avr);
		if (state == cpu_Done || state == cpu_Crashed)
			fail("the firmware %s at program address 0x%04x", state == cpu_Done ? "ended" : "crashed",
			     avr->pc);
	}
}

static void wait_for_line(uint64_t timeout_us)
{
	struct timespec timeout = {(time_t)(timeout_us / 1000000), (long)(timeout_us % 1000000) * 1000};
	struct pollfd line = {.fd = board.master, .events = POLLIN};
	/* With nobody at the other end poll would return at once, for ever. */
	bool watch = somebody_listens() && board.to_chip_count < sizeof board.to_chip;
	ppoll(&line, watch ? 1 : 0, &timeout, NULL);
}

static void live(uint64_t stop_at_parent)
{
	uint64_t saved_us = now_us();
	board.started_us = saved_us;
	while (!stop_asked) {
		uint64_t at_us = now_us();
		uint64_t chip_us = board.avr->cycle / (FREQUENCY_HZ / 1000000);
		if (at_us - board.started_us > chip_us + LAG_US_MAX)
			board.started_us = at_us - chip_us;
		if (inhibit_asked && !board.inhibited)
			set_jumper(true);
		/* First the chip catches up, then it hears what came: the other way round it would hear it too early. */
		run_until((at_us - board.started_us) * (FREQUENCY_HZ / 1000000));
		line_exchange(at_us);
		if (at_us - saved_us >= SAVE_INTERVAL_US) {
			saved_us = at_us;
			eeprom_save();
			if (!ledger_file_save())
				fail("cannot write the ledger: %s", strerror(errno));
			if (stop_at_parent && (uint64_t)getppid() != stop_at_parent)
				return;
		}
		bool busy = board.to_chip_count || at_us - board.line_used_us < BUSY_AFTER_BYTE_US;
		wait_for_line(busy ? BUSY_SLICE_US : IDLE_SLICE_US);
	}
}

/* --- Start --------------------------------------------------------------------------------------------------------- */

static void on_signal(int number)
{
	if (number == SIGUSR1)
		inhibit_asked = 1;
	else
		stop_asked = 1;
}

static void only_errors(avr_t *avr, const int level, const char *format, va_list arguments)
{
	(void)avr;
	if (level <= LOG_ERROR)
		vfprintf(stderr, format, arguments);
}

static void board_make(const char *elf_path)
{
	static elf_firmware_t firmware;
	avr_global_logger_set(only_errors);
	if (elf_read_firmware(elf_path, &firmware) != 0)
		fail("cannot read the firmware %s; build it with make", elf_path);
	avr_t *avr = avr_make_mcu_by_name("atmega328p");
	if (!avr)
		fail("this simavr knows no atmega328p");
	board.avr = avr;
	avr_init(avr);
	avr->frequency = firmware.frequency = FREQUENCY_HZ;
	avr_load_firmware(avr, &firmware);
	avr->vcc = avr->avcc = avr->aref = 5000;
	avr->sleep = do_not_sleep;

	uint32_t silent = 0;
	avr_ioctl(avr, AVR_IOCTL_UART_SET_FLAGS('0'), &silent);
	board.uart_input = avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_INPUT);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUTPUT), chip_sent, NULL);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUT_XON), uart_xon, NULL);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_UART_GETIRQ('0'), UART_IRQ_OUT_XOFF), uart_xoff, NULL);
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_ADC_GETIRQ, ADC_IRQ_OUT_TRIGGER), conversion_starts, NULL);
	avr_register_io_write(avr, GPIOR1_ADDRESS, report_byte, NULL);
	avr_register_io_write(avr, GPIOR0_ADDRESS, report_event, NULL);
}

static __attribute__((noreturn)) void usage(FILE *to, int status)
{
	fputs("usage: avr-runner --link PATH --eeprom FILE [options] FIRMWARE.elf\n"
	      "  --link PATH     symbolic link to make, to the sensor's serial port\n"
	      "  --eeprom FILE   the EEPROM's 1024 bytes; an erased one where there is no file\n"
	      "  --ledger FILE   account of what the firmware took, sent, saw acknowledged and dropped\n"
	      "  --seed N        which temperatures the sensor measures (default 0)\n"
	      "  --with-parent   stop when the process that started this one is gone\n"
	      "SIGUSR1 sets the jumper that stops sampling; SIGTERM and SIGINT switch the board off.\n",
	      to);
	exit(status);
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{"link", required_argument, NULL, 'l'},	 {"eeprom", required_argument, NULL, 'e'},
		{"ledger", required_argument, NULL, 'j'}, {"seed", required_argument, NULL, 's'},
		{"with-parent", no_argument, NULL, 'p'}, {"help", no_argument, NULL, 'h'},
		{0},
	};
	const char *link_path = NULL, *ledger_path = NULL;
	uint64_t stop_at_parent = 0;
	for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
		switch (option) {
		case 'l':
			link_path = optarg;
			break;
		case 'e':
			board.eeprom_path = optarg;
			break;
		case 'j':
			ledger_path = optarg;
			break;
		case 's':
			board.seed = strtoull(optarg, NULL, 0);
			break;
		case 'p':
			stop_at_parent = (uint64_t)getppid();
			break;
		case 'h':
			usage(stdout, 0);
		default:
			usage(stderr, 2);
		}
	}
	if (!link_path || !board.eeprom_path || optind != argc - 1)
		usage(stderr, 2);

	/* No SA_RESTART: a signal ends the wait. */
	struct sigaction action = {.sa_handler = on_signal};
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGUSR1, &action, NULL);

	if (ledger_path && !ledger_file_open(ledger_path))
		fail("cannot read the ledger %s: %s", ledger_path, strerror(errno));
	board_make(argv[optind]);
	eeprom_load();
	line_open(link_path);
	live(stop_at_parent);
	eeprom_save();
	bool saved = ledger_file_save();
	unlink(link_path);
	if (!saved)
		fail("cannot write the ledger %s: %s", ledger_path, strerror(errno));
	return 0;
}
