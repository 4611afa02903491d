#include "fault_log.h"

#include <inttypes.h>
#include <stdio.h>

#include "system.h"

static FILE *file;

bool fault_log_open(const char *path)
{
	file = fopen(path, "ae");
	return file != NULL;
}

static void write_line(const char *kind, const char *words)
{
	if (!file)
		return;
	fprintf(file, "{\"time_us\":%" PRIu64 ",\"%s\":\"%s\"}\n", realtime_us(), kind, words);
	fflush(file);
}

void fault_log(const char *words)
{
	write_line("fault", words);
}

void fault_log_refused(const char *command)
{
	write_line("refused", command);
}
