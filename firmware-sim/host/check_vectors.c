/* Check the C code against files of vectors that the Python side has made:
 *
 *   check-vectors FRAMES MQTT
 *
 * Each line is a kind and fields in hexadecimal or decimal, as the files' first lines say. Exit code 1, and a line that
 * says which, where the C code makes or takes something else. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "mqtt_packets.h"

enum { BYTES_MAX = 512, FIELDS_MAX = 16, LINE_BYTES_MAX = 4096 };

static unsigned checked, wrong;

static __attribute__((noreturn)) void fail(const char *file, unsigned line, const char *what)
{
	fprintf(stderr, "check-vectors: %s line %u: %s\n", file, line, what);
	exit(2);
}

struct bytes {
	uint8_t at[BYTES_MAX];
	size_t length;
};

static bool from_hex(const char *text, struct bytes *to)
{
	to->length = strlen(text) / 2;
	if (to->length > BYTES_MAX)
		return false;
	for (size_t i = 0; i < to->length; i++)
		if (sscanf(text + 2 * i, "%2hhx", &to->at[i]) != 1)
			return false;
	return true;
}

static bool same(const struct bytes *expected, const uint8_t *got, size_t length)
{
	return expected->length == length && memcmp(expected->at, got, length) == 0;
}

/* sensor CONTENT FRAME: what frame_encode makes of the content. */
static bool frame_is_made(const struct bytes *content, const struct bytes *frame)
{
	uint8_t made[FRAME_SENT_BYTES_MAX];
	memcpy(made + 1, content->at, content->length);
	return same(frame, made, frame_encode(made, (uint8_t)content->length));
}

/* gateway CONTENT BYTES: what frame_receive gives, fed with the bytes; nothing where the content is empty. */
static bool frame_is_taken(const struct bytes *content, const struct bytes *bytes)
{
	struct frame_receiver receiver = {.length = 0};
	bool taken = false;
	for (size_t i = 0; i < bytes->length; i++) {
		uint8_t length;
		const uint8_t *got = frame_receive(&receiver, bytes->at[i], &length);
		if (got && (taken || !same(content, got, length)))
			return false;
		taken |= got != NULL;
	}
	return taken == (content->length > 0);
}

static bool check_frame(char **field)
{
	struct bytes content, frame;
	if (!from_hex(field[1], &content) || !from_hex(field[2], &frame))
		return false;
	return strcmp(field[0], "sensor") == 0 ? frame_is_made(&content, &frame) : frame_is_taken(&content, &frame);
}

static bool packet_is(const char *hex, struct mqtt_packet packet)
{
	struct bytes expected;
	return from_hex(hex, &expected) && same(&expected, packet.start, packet.length);
}

/* received BYTES EVENT NUMBER PAYLOAD: the last event of mqtt_receive other than MQTT_NOTHING. */
static bool is_received(char **field)
{
	struct bytes bytes, payload;
	if (!from_hex(field[1], &bytes) || !from_hex(field[4], &payload))
		return false;
	struct mqtt_receiver receiver = {.first = 0};
	enum mqtt_received last = MQTT_NOTHING;
	for (size_t i = 0; i < bytes.length && last != MQTT_MALFORMED; i++) {
		enum mqtt_received received = mqtt_receive(&receiver, bytes.at[i]);
		if (received != MQTT_NOTHING)
			last = received;
	}
	static const char *const names[] = {"nothing", "connack", "puback", "pingresp", "command", "malformed"};
	if (strcmp(names[last], field[2]) != 0)
		return false;
	bool has_number = last == MQTT_CONNACK || last == MQTT_PUBACK || last == MQTT_COMMAND;
	if (has_number && receiver.number != strtoul(field[3], NULL, 10))
		return false;
	if (last != MQTT_COMMAND)
		return true;
	static const char too_long[] = "too long";
	return receiver.payload_length > MQTT_COMMAND_BYTES_MAX
		       ? same(&payload, (const uint8_t *)too_long, sizeof too_long - 1)
		       : same(&payload, receiver.payload, receiver.payload_length);
}

static bool check_mqtt(char **field)
{
	uint8_t buffer[BYTES_MAX];
	struct bytes name, secret;
	if (strcmp(field[0], "received") == 0)
		return is_received(field);
	/* puback PACKET NUMBER */
	if (strcmp(field[0], "puback") == 0)
		return packet_is(field[1], mqtt_puback(buffer, (uint16_t)strtoul(field[2], NULL, 10)));
	if (!from_hex(field[2], &name) || name.length > DEVICE_BYTES_MAX)
		return false;
	struct mqtt_name device = {(const char *)name.at, (uint8_t)name.length};
	/* subscribe PACKET NAME */
	if (strcmp(field[0], "subscribe") == 0)
		return packet_is(field[1], mqtt_subscribe(buffer, device));
	/* connect PACKET NAME SECRET */
	if (strcmp(field[0], "connect") == 0)
		return from_hex(field[3], &secret) && secret.length <= MQTT_SECRET_BYTES_MAX &&
		       packet_is(field[1], mqtt_connect(buffer, device, secret.at, (uint8_t)secret.length));
	/* publish PACKET NAME BOOT INCARNATION DUP SEQUENCE TICK LOST HUNDREDTHS */
	struct mqtt_sample sample = {
		.sequence = (uint32_t)strtoul(field[6], NULL, 10),
		.tick_ms = (uint32_t)strtoul(field[7], NULL, 10),
		.lost = (uint32_t)strtoul(field[8], NULL, 10),
		.centi_celsius = (int16_t)strtol(field[9], NULL, 10),
	};
	return packet_is(field[1], mqtt_publish(buffer, device, (uint32_t)strtoul(field[3], NULL, 10),
						(uint32_t)strtoul(field[4], NULL, 10), &sample, field[5][0] == '1'));
}

static void check_file(const char *path, bool (*check)(char **field))
{
	FILE *file = fopen(path, "r");
	if (!file)
		fail(path, 0, "cannot be read");
	char line[LINE_BYTES_MAX];
	for (unsigned number = 1; fgets(line, sizeof line, file); number++) {
		if (line[0] == '#')
			continue;
		/* An absent field is an empty one, "-" in the file. */
		char *field[FIELDS_MAX];
		for (int i = 0; i < FIELDS_MAX; i++)
			field[i] = "";
		int count = 0;
		for (char *word = strtok(line, " \n"); word && count < FIELDS_MAX; word = strtok(NULL, " \n"))
			field[count++] = strcmp(word, "-") == 0 ? "" : word;
		checked++;
		if (!check(field)) {
			wrong++;
			fprintf(stderr, "check-vectors: %s line %u: the C code makes or takes something else\n", path,
				number);
		}
	}
	fclose(file);
}

int main(int argc, char **argv)
{
	if (argc != 3)
		fail("usage", 0, "check-vectors FRAMES MQTT");
	check_file(argv[1], check_frame);
	check_file(argv[2], check_mqtt);
	printf("%u vectors, %u wrong\n", checked, wrong);
	return wrong != 0;
}
