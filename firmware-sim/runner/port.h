/* The serial adapter between the board and its host: a pseudo-terminal with a symbolic link to it, to be plugged and
 * unplugged. Bytes that nobody listens to are lost, as on a real line. */
#ifndef PORT_H
#define PORT_H

#include <stdbool.h>

/* Plug the adapter in, under that link. Ends the program where that fails. */
void port_open(const char *link_path);

/* Take the adapter out: the host's end hangs up, and the link goes. The board has another supply and runs on. */
void port_unplug(void);

/* The same when the chip is in the middle of a frame. */
void port_unplug_in_frame(void);

bool port_is_plugged(void);

/* Plug it in again: under its first link, or as USB does, under a new one: LINK@2, LINK@3 and so on. Where it waits
 * to be taken out in a frame's middle, it stays in instead. False, and nothing done, where it is in already. */
bool port_plug(bool same_name);

/* Whether opening the port resets the chip, as an Arduino's DTR line does. */
void port_set_auto_reset(bool resets);

/* Move bytes between the pseudo-terminal and the line. True where there were some. */
bool port_exchange(void);

/* What to poll for bytes from the host; -1 where there is nobody, or no room for them. */
int port_fd(void);

/* Remove the link. */
void port_close(void);

#endif
