#include "mqtt_packets.h"

#include <string.h>

#include "text.h"

enum {
	/* First byte of a packet: type and flags (section 2.2). */
	CONNECT = 0x10,
	CONNACK = 0x20,
	PUBLISH = 0x30,
	PUBACK = 0x40,
	SUBSCRIBE = 0x82,
	SUBACK = 0x90,
	PINGREQ = 0xC0,
	PINGRESP = 0xD0,
	TYPE = 0xF0,
	PUBLISH_DUP = 0x08,
	PUBLISH_QOS_1 = 0x02,
	PUBLISH_QOS = 0x06,

	PROTOCOL_LEVEL = 4,
	/* Connect flags (section 3.1.2.3). */
	USER_NAME_AND_PASSWORD = 0xC0,
	WILL_QOS_1 = 0x08,
	WILL = 0x04,

	/* A packet's body is written behind room for the first byte and two bytes of remaining length. */
	HEAD_BYTES_MAX = 3,
	LENGTH_SHIFT_MAX = 21,

	/* The packet identifiers of a run: 14 of the 16 bits, without 0. */
	RUN_BITS = 14,
	RUN_IDS = (1 << RUN_BITS) - 1,
	/* No PUBLISH has it: its lower 14 bits are 0. */
	SUBSCRIBE_ID = 1 << RUN_BITS,
};

/* Parts of a PUBLISH's body (section 3.3). */
enum part { TOPIC_LENGTH_HIGH, TOPIC_LENGTH_LOW, TOPIC, ID_HIGH, ID_LOW, PAYLOAD };

static const char device_topic[] = "device/";
static const char will_payload[] = "{\"status\":\"lost\"}";

/* Put the head in front of a body of up to 255 bytes that ends at `end`. */
static struct mqtt_packet with_head(uint8_t *to, const uint8_t *end, uint8_t first)
{
	uint8_t *start = to + HEAD_BYTES_MAX;
	uint8_t length = (uint8_t)(end - start);
	if (length < 0x80) {
		*--start = length;
	} else {
		*--start = 1;
		*--start = length;
	}
	*--start = first;
	return (struct mqtt_packet){start, (uint8_t)(end - start)};
}

static uint8_t *put_u16(uint8_t *to, uint16_t number)
{
	*to++ = (uint8_t)(number >> 8);
	*to++ = (uint8_t)number;
	return to;
}

static uint8_t *put_field(uint8_t *to, const void *bytes, uint8_t length)
{
	to = put_u16(to, length);
	memcpy(to, bytes, length);
	return to + length;
}

static uint8_t *put_topic(uint8_t *to, const char *first, struct mqtt_name name, const char *last)
{
	uint8_t *end = text_put(to + 2, first);
	memcpy(end, name.text, name.length);
	end = text_put(end + name.length, last);
	put_u16(to, (uint16_t)(end - to - 2));
	return end;
}

struct mqtt_packet mqtt_connect(uint8_t *to, struct mqtt_name name, const uint8_t *secret, uint8_t secret_length)
{
	uint8_t *end = put_field(to + HEAD_BYTES_MAX, "MQTT", 4);
	*end++ = PROTOCOL_LEVEL;
	*end++ = secret_length ? USER_NAME_AND_PASSWORD | WILL_QOS_1 | WILL : WILL_QOS_1 | WILL;
	end = put_u16(end, MQTT_KEEP_ALIVE_S);
	end = put_field(end, name.text, name.length);
	end = put_topic(end, device_topic, name, "/status");
	end = put_field(end, will_payload, sizeof will_payload - 1);
	if (secret_length) {
		end = put_field(end, name.text, name.length);
		end = put_field(end, secret, secret_length);
	}
	return with_head(to, end, CONNECT);
}

uint16_t mqtt_packet_id(uint32_t boot, uint32_t sequence)
{
	return (uint16_t)(boot << RUN_BITS) | (uint16_t)(sequence % RUN_IDS + 1);
}

static uint8_t *put_payload(uint8_t *to, uint32_t boot, uint32_t incarnation, const struct mqtt_sample *sample)
{
	to = text_put(to, "{\"celsius\":");
	to = text_put_hundredths(to, sample->centi_celsius);
	to = text_put(to, ",\"boot\":\"");
	to = text_put_decimal(to, boot);
	*to++ = '-';
	to = text_put_hex(to, incarnation);
	to = text_put(to, "\",\"seq\":");
	to = text_put_decimal(to, sample->sequence);
	to = text_put(to, ",\"tick\":");
	to = text_put_decimal(to, sample->tick_ms);
	if (sample->lost) {
		to = text_put(to, ",\"lost\":[");
		to = text_put_decimal(to, sample->sequence - sample->lost);
		*to++ = ',';
		to = text_put_decimal(to, sample->sequence - 1);
		*to++ = ']';
	}
	*to++ = '}';
	return to;
}

struct mqtt_packet mqtt_publish(uint8_t *to, struct mqtt_name name, uint32_t boot, uint32_t incarnation,
				const struct mqtt_sample *sample, bool again)
{
	uint8_t *end = put_topic(to + HEAD_BYTES_MAX, device_topic, name, "/thermo");
	end = put_u16(end, mqtt_packet_id(boot, sample->sequence));
	end = put_payload(end, boot, incarnation, sample);
	return with_head(to, end, again ? PUBLISH | PUBLISH_QOS_1 | PUBLISH_DUP : PUBLISH | PUBLISH_QOS_1);
}

struct mqtt_packet mqtt_pingreq(void)
{
	static const uint8_t packet[MQTT_PINGREQ_BYTES] = {PINGREQ, 0};
	return (struct mqtt_packet){packet, sizeof packet};
}

struct mqtt_packet mqtt_subscribe(uint8_t *to, struct mqtt_name name)
{
	uint8_t *end = put_u16(to + HEAD_BYTES_MAX, SUBSCRIBE_ID);
	end = put_topic(end, "command/", name, "/#");
	*end++ = 1; /* QoS */
	return with_head(to, end, SUBSCRIBE);
}

struct mqtt_packet mqtt_puback(uint8_t *to, uint16_t packet_id)
{
	return with_head(to, put_u16(to + HEAD_BYTES_MAX, packet_id), PUBACK);
}

/* Whether a server may send a packet with this first byte and length. A SUBACK passes whatever it says: a gateway that
 * grants no subscription sends no commands. */
static bool expected(uint8_t first, uint32_t length)
{
	if ((first & TYPE) == PUBLISH)
		return true;
	return (first == PINGRESP && length == 0) || (first == SUBACK && length == 3) || ((first == CONNACK || first == PUBACK) && length == 2);
}

static enum mqtt_received take_packet(struct mqtt_receiver *receiver)
{
	receiver->at = 0;
	/* A PUBLISH that ends before its payload has no topic, or no identifier. Nobody sends such a one. */
	if ((receiver->first & TYPE) == PUBLISH)
		return receiver->part == PAYLOAD ? MQTT_COMMAND : MQTT_NOTHING;
	switch (receiver->first) {
	case CONNACK:
		/* The only acknowledge flag is "session present". It changes nothing here. */
		if (receiver->number >> 8 > 1)
			return MQTT_MALFORMED;
		receiver->number &= 0xFF;
		return MQTT_CONNACK;
	case PUBACK:
		return MQTT_PUBACK;
	case PINGRESP:
		return MQTT_PINGRESP;
	default:
		return MQTT_NOTHING;
	}
}

static void take_publish_byte(struct mqtt_receiver *receiver, uint8_t byte)
{
	uint8_t after_topic = receiver->first & PUBLISH_QOS ? ID_HIGH : PAYLOAD;
	switch (receiver->part) {
	case TOPIC_LENGTH_HIGH:
		receiver->topic_left = (uint16_t)(byte << 8);
		receiver->part = TOPIC_LENGTH_LOW;
		return;
	case TOPIC_LENGTH_LOW:
		receiver->topic_left |= byte;
		receiver->part = receiver->topic_left ? TOPIC : after_topic;
		return;
	case TOPIC:
		if (--receiver->topic_left == 0)
			receiver->part = after_topic;
		return;
	case ID_HIGH:
	case ID_LOW:
		receiver->number = (uint16_t)(receiver->number << 8) | byte;
		receiver->part++;
		return;
	default:
		if (receiver->payload_length < MQTT_COMMAND_BYTES_MAX)
			receiver->payload[receiver->payload_length] = byte;
		if (receiver->payload_length <= MQTT_COMMAND_BYTES_MAX)
			receiver->payload_length++;
	}
}

enum mqtt_received mqtt_receive(struct mqtt_receiver *receiver, uint8_t byte)
{
	switch (receiver->at) {
	case 0:
		receiver->first = byte;
		receiver->shift = 0;
		receiver->left = 0;
		receiver->number = 0;
		receiver->part = TOPIC_LENGTH_HIGH;
		receiver->payload_length = 0;
		receiver->at = 1;
		return MQTT_NOTHING;
	case 1:
		receiver->left |= (uint32_t)(byte & 0x7F) << receiver->shift;
		receiver->shift += 7;
		if (byte & 0x80)
			return receiver->shift > LENGTH_SHIFT_MAX ? MQTT_MALFORMED : MQTT_NOTHING;
		if (!expected(receiver->first, receiver->left))
			return MQTT_MALFORMED;
		receiver->at = 2;
		return receiver->left ? MQTT_NOTHING : take_packet(receiver);
	default:
		if ((receiver->first & TYPE) == PUBLISH)
			take_publish_byte(receiver, byte);
		else
			receiver->number = (uint16_t)(receiver->number << 8) | byte;
		return --receiver->left ? MQTT_NOTHING : take_packet(receiver);
	}
}
