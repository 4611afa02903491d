/* The way to the gateway. A build has one link (link_serial.c or link_mqtt.c); the core does not know which. */
#ifndef LINK_H
#define LINK_H

#include <stdint.h>

#include "identity.h"

void link_start(const struct identity *identity);

/* Take in received bytes, and send what is due. To be called after every wake-up. */
void link_poll(uint32_t now_ms);

#endif
