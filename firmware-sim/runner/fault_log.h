/* What was done to the board and when: a file of JSON lines, appended to. */
#ifndef FAULT_LOG_H
#define FAULT_LOG_H

#include <stdbool.h>

/* Without a call of this nothing is written. False, with errno, when the file cannot be opened. */
bool fault_log_open(const char *path);

/* `{"time_us":1700000000000000,"fault":"power-cycle 50"}`, on disk at once; the words must need no escape in JSON. */
void fault_log(const char *words);

/* The same for a command that changes nothing, with the reason:
 * `{"time_us":1700000000000000,"refused":"noise 2","why":"it is: noise SHARE (0 to 1)"}`. */
void fault_log_refused(const char *command, const char *why);

/* Whether the LED is on, where that is new; it is off at first: `{"time_us":1700000000000000,"led":"on"}`. */
void fault_log_led(bool on);

/* How the modem's connection to the gateway stands, or whether somebody has the serial port open, where that is new:
 * `{"time_us":1700000000000000,"link":"let in"}`. */
void fault_log_link(const char *words);

#endif
