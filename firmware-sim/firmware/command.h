/* Acts on commands from the cloud, whatever link they came by. Add yours here. */
#ifndef COMMAND_H
#define COMMAND_H

#include <stdbool.h>
#include <stdint.h>

/* `led=1` and `led=0` switch the LED. Returns false for any other command. A command may come twice. */
bool command_do(const uint8_t *payload, uint8_t length);

#endif
