#include "fault_log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "system.h"

static FILE *file;

bool fault_log_open(const char *path)
{
	file = fopen(path, "ae");
	return file != NULL;
}

static void write_line(const char *kind, const char *words, const char *why)
{
	if (!file)
		return;
	fprintf(file, "{\"time_us\":%" PRIu64 ",\"%s\":\"%s\"", realtime_us(), kind, words);
	if (why)
		fprintf(file, ",\"why\":\"%s\"", why);
	fputs("}\n", file);
	fflush(file);
}

void fault_log(const char *words)
{
	write_line("fault", words, NULL);
}

void fault_log_refused(const char *command, const char *why)
{
	write_line("refused", command, why);
}

void fault_log_led(bool on)
{
	static bool last;
	if (on == last)
		return;
	last = on;
	write_line("led", on ? "on" : "off", NULL);
}

void fault_log_link(const char *words)
{
	static char last[256];
	if (strcmp(words, last) == 0)
		return;
	snprintf(last, sizeof last, "%s", words);
	write_line("link", last, NULL);
}
