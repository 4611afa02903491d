#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "chip.h"
#include "fault_log.h"
#include "line.h"
#include "modem.h"
#include "pace.h"
#include "port.h"
#include "system.h"

enum {
	LINE_LENGTH_MAX = 256,
	WORDS_MAX = 3,
	OFF_MS = 50,
	BROWN_OUT_MS = 5,
	OFF_MS_MAX = 3600000,
	WRITTEN_WELL = 2,
	WRITTEN_WELL_MAX = 11,
	LOST_BYTES_MAX = 1000000,
	BAUD_MIN = 300,
	BAUD_MAX = 2000000,
	PPM_MAX = 100000,
};

static struct {
	const char *path;
	int fd;
	bool has_modem;
	char line[LINE_LENGTH_MAX];
	size_t length;
} control = {.fd = -1};

/* --- Arguments ----------------------------------------------------------------------------------------------------- */

/* A missing word is the default. */
static bool number(const char *word, double least, double most, double without, double *value)
{
	*value = without;
	if (!word)
		return true;
	char *end;
	*value = strtod(word, &end);
	return *word && !*end && *value >= least && *value <= most;
}

static bool needed_number(const char *word, double least, double most, double *value)
{
	return word && number(word, least, most, 0, value);
}

static bool on_or_off(const char *word, bool *on)
{
	*on = word && strcmp(word, "on") == 0;
	return *on || (word && strcmp(word, "off") == 0);
}

/* A single word that may be left out. */
static bool optional(const char *word, const char *expected, bool *given)
{
	*given = word != NULL;
	return !word || strcmp(word, expected) == 0;
}

/* --- Commands ------------------------------------------------------------------------------------------------------ */

/* Each gives DONE, or does nothing and gives the reason, in words that need no escape in JSON. */
#define DONE NULL
#define WRONG "" /* its arguments: the reason is how it is written */

static const char *command_reset(char **words)
{
	if (words[0])
		return WRONG;
	chip_reset();
	return DONE;
}

static const char *command_power_cycle(char **words)
{
	double off_ms;
	if (!number(words[0], 1, OFF_MS_MAX, OFF_MS, &off_ms) || words[1])
		return WRONG;
	chip_power_off((uint32_t)off_ms, POWER_ON);
	if (control.has_modem)
		modem_power_off();
	return DONE;
}

static const char *command_brown_out(char **words)
{
	double off_ms;
	if (!number(words[0], 1, OFF_MS_MAX, BROWN_OUT_MS, &off_ms) || words[1])
		return WRONG;
	chip_power_off((uint32_t)off_ms, BROWN_OUT);
	return DONE;
}

static const char *command_brown_out_in_write(char **words)
{
	double off_ms, written_well;
	if (!number(words[0], 1, OFF_MS_MAX, BROWN_OUT_MS, &off_ms) ||
	    !number(words[1], 0, WRITTEN_WELL_MAX, WRITTEN_WELL, &written_well) || words[2])
		return WRONG;
	chip_power_off_in_write((uint32_t)off_ms, (unsigned)written_well);
	return DONE;
}

static const char *command_unplug(char **words)
{
	bool in_frame;
	if (!optional(words[0], "in-frame", &in_frame) || words[1])
		return WRONG;
	if (!port_is_plugged())
		return "it is unplugged already";
	if (in_frame)
		port_unplug_in_frame();
	else
		port_unplug();
	return DONE;
}

static const char *command_plug(char **words)
{
	bool same;
	if (!optional(words[0], "same", &same) || words[1])
		return WRONG;
	return port_plug(same) ? DONE : "it is plugged in already";
}

static const char *command_noise(char **words)
{
	double share;
	if (!needed_number(words[0], 0, 1, &share) || words[1])
		return WRONG;
	line_set_noise(share);
	return DONE;
}

static const char *command_overrun(char **words)
{
	double bytes;
	if (!needed_number(words[0], 1, LOST_BYTES_MAX, &bytes) || words[1])
		return WRONG;
	line_lose((uint32_t)bytes);
	return DONE;
}

static const char *command_baud(char **words)
{
	double baud = 0;
	bool by_itself = words[0] && strcmp(words[0], "auto") == 0;
	if ((!by_itself && !needed_number(words[0], BAUD_MIN, BAUD_MAX, &baud)) || words[1])
		return WRONG;
	line_force_far_baud(baud);
	return DONE;
}

static const char *command_ppm(char **words)
{
	double ppm;
	if (!needed_number(words[0], -PPM_MAX, PPM_MAX, &ppm) || words[1])
		return WRONG;
	pace_set_ppm(ppm);
	return DONE;
}

static const char *command_auto_reset(char **words)
{
	bool on;
	if (!on_or_off(words[0], &on) || words[1])
		return WRONG;
	port_set_auto_reset(on);
	return DONE;
}

static const char *command_inhibit(char **words)
{
	bool on;
	if (!on_or_off(words[0], &on) || words[1])
		return WRONG;
	chip_inhibit(on);
	return DONE;
}

static const char *command_erase_eeprom(char **words)
{
	bool counter;
	if (!optional(words[0], "counter", &counter) || words[1])
		return WRONG;
	chip_erase(!counter);
	return DONE;
}

static const char *command_wifi(char **words)
{
	bool on;
	if (!on_or_off(words[0], &on) || words[1])
		return WRONG;
	modem_set_wifi(on);
	return DONE;
}

static const char *command_modem_reset(char **words)
{
	if (words[0])
		return WRONG;
	modem_restart();
	return DONE;
}

enum where { EVERY_BOARD, WITH_PORT, WITH_MODEM };

static const struct command {
	const char *name;
	const char *arguments; /* as sluice_sim/avr_faults.py has them */
	enum where where;
	const char *(*obey)(char **words); /* WORDS_MAX and a null, nulls from the first missing one on */
} commands[] = {
	{"reset", "", EVERY_BOARD, command_reset},
	{"power-cycle", "[MS (1 to 3600000)]", EVERY_BOARD, command_power_cycle},
	{"brown-out", "[MS (1 to 3600000)]", EVERY_BOARD, command_brown_out},
	{"brown-out-in-write", "[MS (1 to 3600000) [BYTES (0 to 11)]]", EVERY_BOARD, command_brown_out_in_write},
	{"unplug", "[in-frame]", WITH_PORT, command_unplug},
	{"plug", "[same]", WITH_PORT, command_plug},
	{"noise", "SHARE (0 to 1)", EVERY_BOARD, command_noise},
	{"overrun", "BYTES (1 to 1000000)", EVERY_BOARD, command_overrun},
	{"baud", "BAUD (300 to 2000000)|auto", EVERY_BOARD, command_baud},
	{"ppm", "PPM (-100000 to 100000)", EVERY_BOARD, command_ppm},
	{"auto-reset", "on|off", WITH_PORT, command_auto_reset},
	{"inhibit", "on|off", EVERY_BOARD, command_inhibit},
	{"erase-eeprom", "[counter]", EVERY_BOARD, command_erase_eeprom},
	{"wifi", "on|off", WITH_MODEM, command_wifi},
	{"modem-reset", "", WITH_MODEM, command_modem_reset},
};

static void refuse(const char *line, const char *why)
{
	fprintf(stderr, "avr-runner: refused %s: %s\n", line, why);
	fault_log_refused(line, why);
}

static void obey(const char *line)
{
	char copy[LINE_LENGTH_MAX], usage[LINE_LENGTH_MAX];
	snprintf(copy, sizeof copy, "%s", line);
	char *words[WORDS_MAX + 1] = {NULL}, *rest;
	char *name = strtok_r(copy, " ", &rest);
	if (!name)
		return;
	for (size_t i = 0; i < WORDS_MAX && (words[i] = strtok_r(NULL, " ", &rest)); i++)
		;
	for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
		const struct command *command = &commands[i];
		if (strcmp(name, command->name) != 0)
			continue;
		const char *why;
		if (command->where == (control.has_modem ? WITH_PORT : WITH_MODEM))
			why = control.has_modem ? "it is for boards of the serial build"
						: "it is for boards of the MQTT build";
		else
			why = command->obey(words);
		if (why == DONE) {
			fault_log(line);
			return;
		}
		snprintf(usage, sizeof usage, "it is: %s%s%s", name, *command->arguments ? " " : "", command->arguments);
		refuse(line, *why ? why : usage);
		return;
	}
	refuse(line, "there is no such command");
}

/* --- Pipe ---------------------------------------------------------------------------------------------------------- */

void control_open(const char *path, bool has_modem)
{
	control.path = path;
	control.has_modem = has_modem;
	char path_new[4096];
	snprintf(path_new, sizeof path_new, "%s.new", path);
	unlink(path_new);
	/* Open for writing too: then it does not end when a writer goes. Named at last: who finds it can write to it. */
	if (mkfifo(path_new, 0600) != 0 || (control.fd = open(path_new, O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0 ||
	    rename(path_new, path) != 0)
		fail("cannot make the control pipe %s: %s", path, strerror(errno));
}

int control_fd(void)
{
	return control.fd;
}

void control_obey(void)
{
	char bytes[LINE_LENGTH_MAX];
	ssize_t got;
	while (control.fd >= 0 && (got = read(control.fd, bytes, sizeof bytes)) > 0) {
		for (ssize_t i = 0; i < got; i++) {
			if (bytes[i] == '\n') {
				control.line[control.length] = 0;
				control.length = 0;
				obey(control.line);
			} else if (control.length < sizeof control.line - 1) {
				/* What JSON would need an escape for is in no command: it makes the line wrong. */
				bool plain = bytes[i] >= ' ' && bytes[i] <= '~' && bytes[i] != '"' && bytes[i] != '\\';
				control.line[control.length++] = plain ? bytes[i] : '?';
			}
		}
	}
}

void control_close(void)
{
	if (control.fd >= 0)
		unlink(control.path);
}
