/* Execute the sensor's firmware in simavr, in real time, with its serial line on a pseudo-terminal or at a modem.
 *
 * The board around the chip: a TMP36-like sensor on ADC0, a floating pin ADC7, a jumper on D2, an EEPROM that lives in a
 * file, and at the UART a serial adapter or a Wi-Fi module. What can go wrong with each is done by command (control.c). */
#define _GNU_SOURCE /* ppoll */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "chip.h"
#include "control.h"
#include "eeprom.h"
#include "fault_log.h"
#include "ledger_file.h"
#include "line.h"
#include "modem.h"
#include "pace.h"
#include "port.h"
#include "system.h"

enum {
	/* How long the chip may lag behind while nothing moves on the line, and while something does. */
	IDLE_SLICE_US = 4000,
	BUSY_SLICE_US = 1000,
	BUSY_AFTER_BYTE_US = 20000,
	SAVE_INTERVAL_US = 500000,
};

static volatile sig_atomic_t stop_asked, inhibit_asked;

struct settings {
	const char *link_path, *eeprom_path, *ledger_path, *samples_path, *control_path, *faults_path, *elf_path;
	uint64_t seed;
	double noise, ppm;
	bool auto_reset, modem;
	pid_t parent; /* 0: it may go */
};

static void save(void)
{
	struct stack stack = chip_stack();
	ledger_file_stack(stack.used, stack.room);
	eeprom_save();
	if (!ledger_file_save())
		fail("cannot write the ledger or the samples: %s", strerror(errno));
}

static void wait_for_something(bool modem, uint64_t timeout_us)
{
	struct timespec timeout = {(time_t)(timeout_us / 1000000), (long)(timeout_us % 1000000) * 1000};
	struct pollfd of_interest[] = {
		modem ? modem_pollfd() : (struct pollfd){.fd = port_fd(), .events = POLLIN},
		{.fd = control_fd(), .events = POLLIN},
	};
	ppoll(of_interest, sizeof of_interest / sizeof *of_interest, &timeout, NULL);
}

static void note_standstill(uint64_t now_us)
{
	uint64_t stood_us = pace_stood_still_us(now_us);
	if (!stood_us)
		return;
	char words[96];
	snprintf(words, sizeof words, "its clock stood still for %" PRIu64 " ms, as this machine did", stood_us / 1000);
	fault_log(words);
}

static void live(const struct settings *settings)
{
	uint64_t saved_us = boottime_us(), line_used_us = 0;
	pace_start(saved_us);
	while (!stop_asked) {
		uint64_t at_us = boottime_us();
		note_standstill(at_us);
		control_obey();
		if (inhibit_asked && !chip_inhibited())
			chip_inhibit(true);
		inhibit_asked = 0;
		pace_ran(chip_run(pace_due(at_us)));
		if (settings->modem ? modem_exchange() : port_exchange())
			line_used_us = at_us;
		if (at_us - saved_us >= SAVE_INTERVAL_US) {
			saved_us = at_us;
			save();
			if (settings->parent && getppid() != settings->parent)
				return;
		}
		if (pace_is_behind())
			continue;
		bool busy = line_busy() || at_us - line_used_us < BUSY_AFTER_BYTE_US;
		wait_for_something(settings->modem, busy ? BUSY_SLICE_US : IDLE_SLICE_US);
	}
}

static void on_signal(int number)
{
	if (number == SIGUSR1)
		inhibit_asked = 1;
	else
		stop_asked = 1;
}

static __attribute__((noreturn)) void usage(FILE *to, int status)
{
	fputs("usage: avr-runner --eeprom FILE (--link PATH | --modem) [options] FIRMWARE.elf\n"
	      "  --link PATH     symbolic link to make, to the sensor's serial port\n"
	      "  --modem         an ESP-AT module at the UART instead, with this machine's TCP\n"
	      "  --eeprom FILE   the EEPROM's 1024 bytes; an erased one where there is no file\n"
	      "  --ledger FILE   account of what the firmware took, sent, saw acknowledged and dropped\n"
	      "  --samples FILE  every sample as CSV, appended: boot,sequence,centi_celsius,time_us,boottime_us\n"
	      "  --control PATH  named pipe to make, for commands to the running board, one a line\n"
	      "  --faults FILE   what was done to the board and when, as JSON lines, appended\n"
	      "  --seed N        which temperatures the sensor measures and which bytes noise hits (default 0)\n"
	      "  --noise SHARE   share of bytes with one flipped bit, each way\n"
	      "  --ppm PPM       by how many parts in a million the oscillator is too fast\n"
	      "  --auto-reset    opening the port resets the chip, as on an Arduino\n"
	      "  --with-parent   stop when the process that started this one is gone\n"
	      "SIGUSR1 sets the jumper that stops sampling; SIGTERM and SIGINT switch the board off.\n",
	      to);
	exit(status);
}

static double number_of(const char *text, double least, double most)
{
	char *end;
	double number = strtod(text, &end);
	if (!*text || *end || !(number >= least && number <= most)) {
		fprintf(stderr, "avr-runner: %s is no number from %g to %g\n", text, least, most);
		usage(stderr, 2);
	}
	return number;
}

static struct settings read_settings(int argc, char **argv)
{
	static const struct option options[] = {
		{"link", required_argument, NULL, 'l'},	   {"eeprom", required_argument, NULL, 'e'},
		{"ledger", required_argument, NULL, 'j'},  {"samples", required_argument, NULL, 'S'},
		{"control", required_argument, NULL, 'c'}, {"faults", required_argument, NULL, 'f'},
		{"seed", required_argument, NULL, 's'},	   {"noise", required_argument, NULL, 'n'},
		{"ppm", required_argument, NULL, 'o'},	   {"auto-reset", no_argument, NULL, 'a'},
		{"modem", no_argument, NULL, 'm'},	   {"with-parent", no_argument, NULL, 'p'},
		{"help", no_argument, NULL, 'h'},	   {0},
	};
	struct settings settings = {0};
	for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
		switch (option) {
		case 'l':
			settings.link_path = optarg;
			break;
		case 'e':
			settings.eeprom_path = optarg;
			break;
		case 'j':
			settings.ledger_path = optarg;
			break;
		case 'S':
			settings.samples_path = optarg;
			break;
		case 'c':
			settings.control_path = optarg;
			break;
		case 'f':
			settings.faults_path = optarg;
			break;
		case 's':
			settings.seed = strtoull(optarg, NULL, 0);
			break;
		case 'n':
			settings.noise = number_of(optarg, 0, 1);
			break;
		case 'o':
			settings.ppm = number_of(optarg, -100000, 100000);
			break;
		case 'a':
			settings.auto_reset = true;
			break;
		case 'm':
			settings.modem = true;
			break;
		case 'p':
			settings.parent = getppid();
			break;
		case 'h':
			usage(stdout, 0);
		default:
			usage(stderr, 2);
		}
	}
	if (!settings.eeprom_path || !settings.link_path == !settings.modem || optind != argc - 1)
		usage(stderr, 2);
	settings.elf_path = argv[optind];
	return settings;
}

int main(int argc, char **argv)
{
	struct settings settings = read_settings(argc, argv);
	/* SA_RESTART: a signal spoils no write of a port or a file. It ends the wait all the same (signal(7)). */
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGUSR1, &action, NULL);

	if (settings.ledger_path && !ledger_file_open(settings.ledger_path))
		fail("cannot read the ledger %s: %s", settings.ledger_path, strerror(errno));
	if (settings.samples_path && !ledger_file_open_samples(settings.samples_path))
		fail("cannot write the samples to %s: %s", settings.samples_path, strerror(errno));
	if (settings.faults_path && !fault_log_open(settings.faults_path))
		fail("cannot write the faults to %s: %s", settings.faults_path, strerror(errno));
	pace_set_ppm(settings.ppm);
	line_connect(chip_make(settings.elf_path, settings.eeprom_path, settings.seed), settings.seed);
	chip_on_reset(line_chip_was_reset);
	line_set_noise(settings.noise);
	if (settings.modem) {
		modem_start();
	} else {
		port_open(settings.link_path);
		port_set_auto_reset(settings.auto_reset);
	}
	/* Last: whoever sees the pipe, sees a board that is on. */
	if (settings.control_path)
		control_open(settings.control_path, settings.modem);
	live(&settings);
	save();
	control_close();
	port_close();
	return 0;
}
