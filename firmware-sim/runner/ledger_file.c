#include "ledger_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "system.h"

struct range {
	uint32_t first, last;
};

/* Closed ranges, sorted, disjoint and not adjacent. */
struct ranges {
	struct range *of;
	size_t count, room;
};

static struct {
	char *path, *path_new;
	char *earlier; /* the finished lines, as they stand in the file */
	size_t earlier_length;
	char boot[24];
	FILE *samples;
	char device[64];
	uint32_t taken, sent;
	unsigned stack_used, stack_room;
	struct ranges acknowledged, dropped;
	bool begun, changed;
} ledger;

static void *must(void *memory)
{
	if (!memory) {
		fputs("avr-runner: out of memory\n", stderr);
		exit(1);
	}
	return memory;
}

static void ranges_add(struct ranges *ranges, uint32_t value)
{
	size_t at = ranges->count; /* the first range that lies wholly above value */
	while (at > 0 && ranges->of[at - 1].first > value)
		at--;
	if (at > 0 && value <= ranges->of[at - 1].last)
		return;
	bool joins_below = at > 0 && ranges->of[at - 1].last + 1 == value;
	bool joins_above = at < ranges->count && value + 1 == ranges->of[at].first;
	if (joins_below && joins_above) {
		ranges->of[at - 1].last = ranges->of[at].last;
		memmove(ranges->of + at, ranges->of + at + 1, (--ranges->count - at) * sizeof *ranges->of);
	} else if (joins_below) {
		ranges->of[at - 1].last = value;
	} else if (joins_above) {
		ranges->of[at].first = value;
	} else {
		if (ranges->count == ranges->room) {
			ranges->room = ranges->room ? 2 * ranges->room : 16;
			ranges->of = must(realloc(ranges->of, ranges->room * sizeof *ranges->of));
		}
		memmove(ranges->of + at + 1, ranges->of + at, (ranges->count++ - at) * sizeof *ranges->of);
		ranges->of[at] = (struct range){value, value};
	}
}

static void write_ranges(FILE *file, const char *name, const struct ranges *ranges)
{
	fprintf(file, ",\"%s\":[", name);
	for (size_t i = 0; i < ranges->count; i++)
		fprintf(file, "%s[%" PRIu32 ",%" PRIu32 "]", i ? "," : "", ranges->of[i].first, ranges->of[i].last);
	fputc(']', file);
}

static void write_current(FILE *file)
{
	fprintf(file, "{\"device\":\"%s\",\"boot\":\"%s\",\"taken\":%" PRIu32 ",\"sent\":%" PRIu32, ledger.device,
		ledger.boot, ledger.taken, ledger.sent);
	write_ranges(file, "acknowledged", &ledger.acknowledged);
	write_ranges(file, "dropped", &ledger.dropped);
	fprintf(file, ",\"stack\":%u,\"stack_room\":%u}\n", ledger.stack_used, ledger.stack_room);
}

bool ledger_file_open(const char *path)
{
	ledger.path = must(strdup(path));
	ledger.path_new = must(malloc(strlen(path) + sizeof ".new"));
	sprintf(ledger.path_new, "%s.new", path);
	FILE *file = fopen(path, "r");
	if (!file)
		return errno == ENOENT;
	char chunk[4096];
	size_t got;
	while ((got = fread(chunk, 1, sizeof chunk, file)) > 0) {
		ledger.earlier = must(realloc(ledger.earlier, ledger.earlier_length + got + 1));
		memcpy(ledger.earlier + ledger.earlier_length, chunk, got);
		ledger.earlier_length += got;
		ledger.earlier[ledger.earlier_length] = 0;
	}
	bool read_all = !ferror(file);
	fclose(file);
	return read_all;
}

bool ledger_file_open_samples(const char *path)
{
	ledger.samples = fopen(path, "ae");
	if (ledger.samples && ftell(ledger.samples) == 0)
		fputs("boot,sequence,centi_celsius,time_us,boottime_us\n", ledger.samples);
	return ledger.samples != NULL;
}

/* A reset within this process ends the account of the boot before it: it joins the finished lines. */
static void finish_current(void)
{
	char *line;
	size_t length;
	FILE *file = must(open_memstream(&line, &length));
	write_current(file);
	if (fclose(file) != 0)
		must(NULL);
	ledger.earlier = must(realloc(ledger.earlier, ledger.earlier_length + length + 1));
	memcpy(ledger.earlier + ledger.earlier_length, line, length + 1);
	ledger.earlier_length += length;
	free(line);
}

bool ledger_file_boot(const char *device, uint32_t boot, uint32_t incarnation)
{
	if (ledger.begun)
		finish_current();
	snprintf(ledger.device, sizeof ledger.device, "%s", device);
	snprintf(ledger.boot, sizeof ledger.boot, "%" PRIu32 "-%08" PRIx32, boot, incarnation);
	char label[40];
	snprintf(label, sizeof label, "\"boot\":\"%s\"", ledger.boot);
	ledger.taken = ledger.sent = 0;
	ledger.acknowledged.count = ledger.dropped.count = 0;
	ledger.begun = ledger.changed = true;
	return !ledger.earlier || !strstr(ledger.earlier, label);
}

void ledger_file_taken(uint32_t sequence, int32_t centi_celsius, uint64_t boottime_us)
{
	ledger.taken++;
	if (ledger.samples)
		fprintf(ledger.samples, "%s,%" PRIu32 ",%" PRId32 ",%" PRIu64 ",%" PRIu64 "\n", ledger.boot, sequence,
			centi_celsius, boottime_us + boot_began_us(), boottime_us);
	ledger.changed = true;
}

void ledger_file_sent(void)
{
	ledger.sent++;
	ledger.changed = true;
}

void ledger_file_acknowledged(uint32_t sequence)
{
	ranges_add(&ledger.acknowledged, sequence);
	ledger.changed = true;
}

void ledger_file_dropped(uint32_t sequence)
{
	ranges_add(&ledger.dropped, sequence);
	ledger.changed = true;
}

void ledger_file_stack(unsigned used, unsigned room)
{
	ledger.changed |= used != ledger.stack_used;
	ledger.stack_used = used;
	ledger.stack_room = room;
}

bool ledger_file_save(void)
{
	if (ledger.samples && fflush(ledger.samples) != 0)
		return false;
	if (!ledger.path || !ledger.begun || !ledger.changed)
		return true;
	FILE *file = fopen(ledger.path_new, "w");
	if (!file)
		return false;
	if (ledger.earlier)
		fwrite(ledger.earlier, 1, ledger.earlier_length, file);
	write_current(file);
	bool written = !ferror(file);
	written &= fclose(file) == 0;
	if (!written || rename(ledger.path_new, ledger.path) != 0)
		return false;
	ledger.changed = false;
	return true;
}
