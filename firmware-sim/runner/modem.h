/* A Wi-Fi module with ESP-AT's commands at the chip's UART, over this machine's real TCP.
 *
 * As ESP-AT 2 has them: AT, ATE, AT+RST, AT+CWMODE, AT+CWJAP, AT+CIPMODE, AT+CIPSTART, AT+CIPSEND, AT+CIPCLOSE, and
 * transparent transmission, which +++ ends. A connection that breaks in transparent transmission is dialled again, and the
 * chip is not told. The access point takes every name and passphrase. All times are the chip's (chip_us). */
#ifndef MODEM_H
#define MODEM_H

#include <poll.h>
#include <stdbool.h>

/* Connect the module to the line and switch it on. */
void modem_start(void);

/* No power, until the chip has some again: the module then starts with it. */
void modem_power_off(void);

/* A reset of the module alone: what it was told is forgotten, but for the access point. Its TCP
 * connection is gone without a farewell: the peer is not told. */
void modem_restart(void);

/* The access point goes out of reach, or comes back. */
void modem_set_wifi(bool in_reach);

/* Take what the chip sent, move bytes between chip and network. True where there were some. */
bool modem_exchange(void);

/* What to poll for the network; .fd is -1 where nothing is awaited. */
struct pollfd modem_pollfd(void);

#endif
