/* Commands to the running board, one a line, through a named pipe. */
#ifndef CONTROL_H
#define CONTROL_H

#include <stdbool.h>

/* Make the pipe; `has_modem` says which of the commands there are. Ends the program where that fails. */
void control_open(const char *path, bool has_modem);

/* What to poll; -1 where there is no pipe. */
int control_fd(void);

/* Carry out the commands that have come. A wrong one is told on standard error and changes nothing. */
void control_obey(void);

/* Remove the pipe. */
void control_close(void);

#endif
