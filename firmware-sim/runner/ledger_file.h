/* The account of what a sensor's firmware knows of its samples, kept as a file of one JSON line for each boot. */
#ifndef LEDGER_FILE_H
#define LEDGER_FILE_H

#include <stdbool.h>
#include <stdint.h>

/* Start the account. Lines of earlier boots that `path` holds are kept. False, with errno, when it cannot be read. */
bool ledger_file_open(const char *path);

/* Append each sample to a file of its own, `boot,sequence,centi_celsius,time_us,boottime_us` with a header. False,
 * with errno, when that fails. */
bool ledger_file_open_samples(const char *path);

/* A new boot of `device` begins. False when the file has a line of that very boot: its account cannot go on. */
bool ledger_file_boot(const char *device, uint32_t boot, uint32_t incarnation);

/* A sample was taken: its value in hundredths of a degree, and when it truly was, in CLOCK_BOOTTIME. */
void ledger_file_taken(uint32_t sequence, int32_t centi_celsius, uint64_t boottime_us);
void ledger_file_sent(void);
void ledger_file_acknowledged(uint32_t sequence);
void ledger_file_dropped(uint32_t sequence);

/* How far the stack of this board ever reached, and its room, in bytes. */
void ledger_file_stack(unsigned used, unsigned room);

/* Write the file anew, by temporary file and rename, if anything changed. False, with errno, when that failed. */
bool ledger_file_save(void);

#endif
