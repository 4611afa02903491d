/* The MQTT link: a session with the gateway that outlives connections, through a modem.
 *
 * A sample is taken out of the ring when it is first sent, and held in the window until its PUBACK has come. So the
 * ring never drops a sample that may have arrived, and a sample that is reported as lost is lost. */
#include <string.h>

#include "board.h"
#include "command.h"
#include "core.h"
#include "ledger.h"
#include "link.h"
#include "modem.h"
#include "mqtt_packets.h"
#include "network.h"

enum {
	WINDOW = 4,
	CONNACK_MS = 10000,
	PUBACK_MS = 10000,
	PINGRESP_MS = 10000,
	/* Commands whose PUBACK is owed. A gateway sends no more at once by default than twice as many; those beyond come
	 * again on the next connection. */
	OWED_MAX = 8,
	/* Below the keep-alive by the time that a full serial line and a slow network may take. */
	PINGREQ_AFTER_MS = MQTT_KEEP_ALIVE_S * 1000L * 2 / 3,
};

_Static_assert((int)MQTT_CONNECT_BYTES_MAX <= (int)MODEM_BUFFER_BYTES &&
		       (int)MQTT_PUBLISH_BYTES_MAX <= (int)MODEM_BUFFER_BYTES,
	"packets fit into the modem's buffer");

enum state {
	OFFLINE,
	CONNECTING, /* CONNECT is sent, CONNACK awaited */
	ONLINE,
};

static struct {
	const struct identity *identity;
	bool provisioned;
	enum state state;
	struct mqtt_sample window[WINDOW]; /* sent, maybe on an earlier connection, and not acknowledged; in order */
	uint8_t held;
	uint8_t sent;            /* the number of them that went over this connection */
	uint32_t next;           /* follows the last sequence that was taken out of the ring */
	uint32_t sent_at_ms;     /* last packet of this connection */
	uint32_t progress_at_ms; /* when the oldest of the window began to wait for its PUBACK */
	uint32_t pinged_at_ms;
	bool pinged; /* PINGRESP is awaited */
	bool subscribed; /* SUBSCRIBE was sent over this connection */
	uint8_t owed;    /* commands that were acted on, and whose PUBACK is not sent: owed_ids, in order */
	uint16_t owed_ids[OWED_MAX];
	struct mqtt_receiver receiver;
} link;

void link_start(const struct identity *identity)
{
	memset(&link, 0, sizeof link);
	link.identity = identity;
	link.provisioned = network_valid();
	modem_start(board_random(), board_now_ms());
}

static struct mqtt_name name(void)
{
	return (struct mqtt_name){link.identity->device, link.identity->device_length};
}

static void give_up(uint32_t now_ms)
{
	link.state = OFFLINE;
	modem_hang_up(now_ms);
}

static void acknowledge(uint16_t packet_id, uint32_t now_ms)
{
	for (uint8_t i = 0; i < link.sent; i++) {
		if (mqtt_packet_id(link.identity->boot, link.window[i].sequence) != packet_id)
			continue;
		ledger_acknowledged(link.window[i].sequence);
		link.held--;
		link.sent--;
		memmove(&link.window[i], &link.window[i + 1], (link.held - i) * sizeof link.window[0]);
		link.progress_at_ms = now_ms;
		return;
	}
	/* It names no packet that is waited for: it is a second answer to one. */
}

/* A command that finds no place for its PUBACK is not acted on, and comes again on the next connection. */
static void command(const struct mqtt_receiver *received)
{
	if (received->number) {
		if (link.owed == OWED_MAX)
			return;
		link.owed_ids[link.owed++] = received->number;
	}
	if (received->payload_length <= MQTT_COMMAND_BYTES_MAX)
		command_do(received->payload, received->payload_length);
}

static void connected(uint8_t return_code, uint32_t now_ms)
{
	enum { SERVER_UNAVAILABLE = 3 };
	if (return_code == 0) {
		/* The window is sent again, with DUP, even if the gateway has not kept the session: it may still have
		 * stored the readings. */
		link.state = ONLINE;
		link.progress_at_ms = now_ms;
		return;
	}
	/* A wrong name or secret stays wrong until a person mends it. "Server unavailable" passes. */
	if (return_code != SERVER_UNAVAILABLE)
		modem_not_soon();
	give_up(now_ms);
}

static void receive(uint8_t byte, uint32_t now_ms)
{
	enum mqtt_received received = mqtt_receive(&link.receiver, byte);
	if (received == MQTT_NOTHING)
		return;
	if (link.state == CONNECTING && received == MQTT_CONNACK) {
		connected((uint8_t)link.receiver.number, now_ms);
	} else if (link.state == ONLINE && received == MQTT_PUBACK) {
		modem_proved();
		acknowledge(link.receiver.number, now_ms);
	} else if (link.state == ONLINE && received == MQTT_PINGRESP) {
		modem_proved();
		link.pinged = false;
	} else if (link.state == ONLINE && received == MQTT_COMMAND) {
		command(&link.receiver);
	} else {
		give_up(now_ms);
	}
}

/* Take the next sample out of the ring. A gap in the sequence shows samples that the ring dropped before it. */
static bool take_next(struct mqtt_sample *sample)
{
	struct reading reading;
	if (!core_hand_over(&reading))
		return false;
	*sample = (struct mqtt_sample){
		.sequence = reading.sequence,
		.tick_ms = reading.tick_ms,
		.lost = reading.sequence - link.next,
		.centi_celsius = reading.centi_celsius,
	};
	link.next = reading.sequence + 1;
	return true;
}

static void send(struct mqtt_packet packet, uint32_t now_ms)
{
	modem_send(packet.start, packet.length);
	link.sent_at_ms = now_ms;
}

static void begin_session(uint8_t *buffer, uint32_t now_ms)
{
	uint8_t secret[MQTT_SECRET_BYTES_MAX];
	uint8_t secret_length = (uint8_t)(network_put(secret, NETWORK_SECRET) - secret);
	memset(&link.receiver, 0, sizeof link.receiver);
	link.sent = 0;
	link.pinged = link.subscribed = false;
	link.owed = 0;
	link.state = CONNECTING;
	send(mqtt_connect(buffer, name(), secret, secret_length), now_ms);
}

static bool dead(uint32_t now_ms)
{
	if (link.state == CONNECTING)
		return now_ms - link.sent_at_ms >= CONNACK_MS;
	return (link.sent && now_ms - link.progress_at_ms >= PUBACK_MS) ||
	       (link.pinged && now_ms - link.pinged_at_ms >= PINGRESP_MS);
}

static void send_next(uint8_t *buffer, uint32_t now_ms)
{
	bool again = link.sent < link.held;
	if (link.owed) {
		send(mqtt_puback(buffer, link.owed_ids[0]), now_ms);
		memmove(&link.owed_ids[0], &link.owed_ids[1], --link.owed * sizeof link.owed_ids[0]);
	} else if (!link.subscribed) {
		link.subscribed = true;
		send(mqtt_subscribe(buffer, name()), now_ms);
	} else if (again || (link.held < WINDOW && take_next(&link.window[link.held]))) {
		if (!again)
			link.held++;
		if (link.sent == 0)
			link.progress_at_ms = now_ms;
		const struct mqtt_sample *sample = &link.window[link.sent++];
		const struct identity *identity = link.identity;
		send(mqtt_publish(buffer, name(), identity->boot, identity->incarnation, sample, again), now_ms);
	} else if (!link.pinged && now_ms - link.sent_at_ms >= PINGREQ_AFTER_MS) {
		link.pinged = true;
		link.pinged_at_ms = now_ms;
		send(mqtt_pingreq(), now_ms);
	}
}

void link_poll(uint32_t now_ms)
{
	uint8_t byte;
	while (board_serial_read(&byte)) {
		if (modem_receive(byte, now_ms) && link.state != OFFLINE)
			receive(byte, now_ms);
	}
	if (!link.provisioned)
		return;
	modem_poll(now_ms);
	if (!modem_connected()) {
		link.state = OFFLINE;
		return;
	}
	if (link.state != OFFLINE && dead(now_ms)) {
		give_up(now_ms);
		return;
	}
	uint8_t *buffer = modem_buffer();
	if (!buffer)
		return;
	if (link.state == OFFLINE)
		begin_session(buffer, now_ms);
	else if (link.state == ONLINE)
		send_next(buffer, now_ms);
}
