/* The packets of MQTT 3.1.1 (OASIS standard, 29 October 2014) that a sensor needs: it publishes with QoS 1, and
 * subscribes to its commands. No hardware, so that it runs on a host too. */
#ifndef MQTT_PACKETS_H
#define MQTT_PACKETS_H

#include <stdbool.h>
#include <stdint.h>

#include "eeprom_layout.h"

enum {
	MQTT_SECRET_BYTES_MAX = sizeof((struct network *)0)->secret - 1,
	MQTT_KEEP_ALIVE_S = 30,
	/* The longest payload: {"celsius":-327.68,"boot":"4294967295-ffffffff",
	 * "seq":4294967295,"tick":4294967295,"lost":[4294967295,4294967295]} */
	MQTT_PAYLOAD_BYTES_MAX = 114,
	/* First byte and remaining length, protocol to keep-alive; client id, will, user name and password. */
	MQTT_CONNECT_BYTES_MAX = 3 + 10 + 2 + DEVICE_BYTES_MAX + (2 + 7 + DEVICE_BYTES_MAX + 7) + (2 + 17) +
				 2 + DEVICE_BYTES_MAX + 2 + MQTT_SECRET_BYTES_MAX,
	/* First byte and remaining length; topic, packet identifier, payload. */
	MQTT_PUBLISH_BYTES_MAX = 3 + (2 + 7 + DEVICE_BYTES_MAX + 7) + 2 + MQTT_PAYLOAD_BYTES_MAX,
	MQTT_PINGREQ_BYTES = 2,
	/* The longest command that is looked at. A longer one is not known. */
	MQTT_COMMAND_BYTES_MAX = 8,
};

/* A packet in a caller's buffer. It may begin after the buffer's start. */
struct mqtt_packet {
	const uint8_t *start;
	uint8_t length;
};

struct mqtt_name {
	const char *text; /* the device's: client identifier, user name, and part of its topics */
	uint8_t length;   /* at most DEVICE_BYTES_MAX */
};

/* CONNECT (section 3.1) that asks for the session to be kept (clean session 0), with a Last Will on
 * `device/NAME/status`. Without a secret there is neither user name nor password. `to` has room for
 * MQTT_CONNECT_BYTES_MAX. */
struct mqtt_packet mqtt_connect(uint8_t *to, struct mqtt_name name, const uint8_t *secret, uint8_t secret_length);

struct mqtt_sample {
	uint32_t sequence;
	uint32_t tick_ms;
	uint32_t lost; /* number of samples right before this one that the ring dropped */
	int16_t centi_celsius;
};

/* PUBLISH (section 3.3) with QoS 1 on `device/NAME/thermo`, with DUP if it was sent before. Otherwise a sample's packet
 * is the same each time. `to` has room for MQTT_PUBLISH_BYTES_MAX. */
struct mqtt_packet mqtt_publish(uint8_t *to, struct mqtt_name name, uint32_t boot, uint32_t incarnation,
				const struct mqtt_sample *sample, bool again);

/* A sample's packet identifier, 1 to 65535. The run's boot counter gives the upper two bits, so that the session,
 * which outlives a reset, never sees the identifiers of the run before. */
uint16_t mqtt_packet_id(uint32_t boot, uint32_t sequence);

/* PINGREQ (section 3.12). */
struct mqtt_packet mqtt_pingreq(void);

/* SUBSCRIBE (section 3.8) to `command/NAME/#` with QoS 1. `to` has room for MQTT_PUBLISH_BYTES_MAX. */
struct mqtt_packet mqtt_subscribe(uint8_t *to, struct mqtt_name name);

/* PUBACK (section 3.4). `to` has room for MQTT_PUBLISH_BYTES_MAX. */
struct mqtt_packet mqtt_puback(uint8_t *to, uint16_t packet_id);

enum mqtt_received {
	MQTT_NOTHING, /* the packet is not whole yet, or of no interest */
	MQTT_CONNACK, /* number: the return code, 0 for accepted */
	MQTT_PUBACK,  /* number: the packet identifier */
	MQTT_PINGRESP,
	MQTT_COMMAND, /* number: the packet identifier, 0 with QoS 0; payload */
	MQTT_MALFORMED, /* not what a server sends: give the connection up */
};

struct mqtt_receiver {
	uint8_t first;     /* type and flags */
	uint8_t at;        /* 0: first byte, 1: remaining length, 2: body */
	uint8_t shift;     /* place of the next byte of the remaining length, in bits */
	uint32_t left;     /* bytes of the body that are still to come */
	uint16_t number;   /* the body's last two bytes, most significant first; in a PUBLISH, the packet identifier */
	uint8_t part;           /* PUBLISH: where in its body */
	uint16_t topic_left;    /* PUBLISH: bytes of the topic that are still to come */
	uint8_t payload_length; /* MQTT_COMMAND_BYTES_MAX + 1: the payload is longer than its room */
	uint8_t payload[MQTT_COMMAND_BYTES_MAX];
};

/* Take in one byte of the connection. A zeroed receiver is at the beginning of a packet. */
enum mqtt_received mqtt_receive(struct mqtt_receiver *receiver, uint8_t byte);

#endif
