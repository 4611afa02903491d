/* The load generator of the gateway's bench: many MQTT 3.1.1 sensors in one thread, with little CPU of their own.
 *
 * It shares two cores with everything that it measures, so a reading costs it one memcpy and a few digits: packets are
 * made from a template per connection, all that one read acknowledged is answered by one write.
 *
 * Standard output is one JSON object a line: "connected", "storm" and, at the end, "done". Times in it are seconds;
 * first_publish and last_acknowledged are CLOCK_REALTIME, to be compared with other programs' clocks. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    PAYLOAD_BYTES = 40,
    TICK_BYTES = 18,             /* "tick":, ten places and a comma */
    PACKET_BYTES_MAX = 128,      /* a remaining length of one byte is enough for every packet here */
    ACKNOWLEDGEMENT_BYTES = 4,
    CONNECT_BYTES_MAX = 512,
    READ_BYTES = 65536,
    WINDOW_MAX = 16384,
    NAME_BYTES = 64,
    KEEP_ALIVE_S = 600,
    EVENTS = 256,
    SECONDS_MAX = 86400,
    /* Latencies: 64 steps for every doubling, from 1 microsecond to beyond an hour. Error at most 1.6 %. */
    STEPS = 64,
    DOUBLINGS = 32,
};
#define REDIAL_MIN_NS 20000000ULL
#define REDIAL_SPREAD_NS 30000000ULL
#define TICK_NS 1000000ULL

typedef enum { ACKNOWLEDGED, SENT, RECEIVED } slot_state; /* RECEIVED: QoS 2, after its PUBREC */

typedef struct {
    uint64_t due_ns; /* when it was to be sent: waiting for the window counts as latency */
    slot_state state;
} slot;

typedef enum { CLOSED, DIALLING, WAITING, ACCEPTED } link_state; /* WAITING: for CONNACK */

typedef struct {
    int fd;
    link_state state;
    bool wants_write;
    unsigned number;
    uint32_t base, next; /* sequences: the oldest unacknowledged, and the next to be sent */
    uint32_t scheduled;  /* how many are due by the rate; unused flat out */
    uint64_t redial_ns;
    slot *slots;
    uint8_t *out; /* what the socket did not take yet */
    size_t out_begin, out_end, out_size;
    uint8_t in[8];
    size_t in_length;
    uint8_t packet[PACKET_BYTES_MAX];
    size_t packet_bytes, id_at, payload_at, payload_bytes;
} connection;

static struct {
    const char *host, *secrets_path, *ledger_path, *name_prefix, *boot, *tick;
    int port;
    unsigned connections, devices, qos, window;
    double rate, seconds, warmup_s, storm_after_s, grace_s;
    uint64_t messages;
    bool reconnect, persistent, identity;
} options = {
    .host = "127.0.0.1", .name_prefix = "d", .boot = "b", .port = 1883, .connections = 100, .qos = 1, .window = 64,
    .grace_s = 30, .identity = true,
};

static connection *sensors;
static char (*secrets)[NAME_BYTES];
static int poller;
static unsigned accepted;
static volatile sig_atomic_t stopping;
static uint64_t scheduled, sent, resent, acknowledged, lost_connections, reconnects, refusals, sessions_lost;
static uint64_t start_ns, last_acknowledged_ns;
static double first_publish_real, last_acknowledged_real;
static uint64_t histogram[DOUBLINGS * STEPS], histogram_count, latency_max_ns;
static uint32_t *by_second;
static unsigned seconds_seen;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

static double real_time(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void die(const char *what, const char *hint)
{
    fprintf(stderr, "load: %s: %s\n", what, hint);
    exit(2);
}

static void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (memory == NULL)
        die("out of memory", "fewer connections, or a smaller window");
    return memory;
}

/* --- latencies ------------------------------------------------------------------------------------------------ */

static unsigned step_of(uint64_t microseconds)
{
    if (microseconds < STEPS)
        return (unsigned)microseconds;
    unsigned doubling = 63 - (unsigned)__builtin_clzll(microseconds) - 6; /* 64 = 2^6 is the first that is scaled */
    unsigned step = (doubling + 1) * STEPS + (unsigned)((microseconds >> doubling) - STEPS);
    return step < DOUBLINGS * STEPS ? step : DOUBLINGS * STEPS - 1;
}

static double milliseconds_of(unsigned step)
{
    if (step < STEPS)
        return step / 1e3;
    unsigned doubling = step / STEPS - 1;
    return (double)((uint64_t)(STEPS + step % STEPS) << doubling) / 1e3;
}

static double quantile(double share)
{
    uint64_t rank = (uint64_t)(share * (double)histogram_count), seen = 0;
    for (unsigned step = 0; step < DOUBLINGS * STEPS; step++) {
        seen += histogram[step];
        if (seen > rank)
            return milliseconds_of(step);
    }
    return (double)latency_max_ns / 1e6;
}

static void count_acknowledgement(const slot *found, uint64_t now)
{
    acknowledged++;
    if ((double)(found->due_ns - start_ns) / 1e9 >= options.warmup_s) {
        uint64_t latency = now - found->due_ns;
        histogram[step_of(latency / 1000)]++;
        histogram_count++;
        if (latency > latency_max_ns)
            latency_max_ns = latency;
    }
}

/* --- packets -------------------------------------------------------------------------------------------------- */

static size_t put_text(uint8_t *at, const char *text, size_t length)
{
    at[0] = (uint8_t)(length >> 8);
    at[1] = (uint8_t)length;
    memcpy(at + 2, text, length);
    return length + 2;
}

static void device_name(const connection *sensor, char *name)
{
    snprintf(name, NAME_BYTES, "%.40s%03u", options.name_prefix, sensor->number % options.devices);
}

/* Who measured: one boot a connection, for two connections of one device count apart. */
static void boot_name(const connection *sensor, char *name)
{
    snprintf(name, NAME_BYTES, "%.1s%04x", options.boot, sensor->number & 0xFFFF);
}

/* PUBLISH (section 3.3) with the places of what changes: packet id, sequence, value. */
static void make_template(connection *sensor)
{
    char device[NAME_BYTES], boot[NAME_BYTES], topic[2 * NAME_BYTES], payload[2 * NAME_BYTES];
    device_name(sensor, device);
    boot_name(sensor, boot);
    int topic_bytes = snprintf(topic, sizeof topic, "device/%s/thermo", device);
    /* Seven places for the sequence and ten for the tick, blanks where they are shorter: JSON takes them. */
    char tick[2 * NAME_BYTES] = "";
    if (options.tick != NULL && snprintf(tick, sizeof tick, "\"%.60s\":0         ,", options.tick) != TICK_BYTES)
        die("--tick", "a name of four letters is needed, so that the payload has 58 bytes");
    const char *form = options.identity ? "{\"boot\":\"%s\",\"seq\":0      ,%s\"c\":21.50}"
                                        : "{\"unit\":\"%s\",\"num\":0      ,%s\"c\":21.50}";
    sensor->payload_bytes = PAYLOAD_BYTES + strlen(tick);
    if (snprintf(payload, sizeof payload, form, boot, tick) != (int)sensor->payload_bytes)
        die("--boot", "one character is needed, so that the payload has 40 bytes");
    size_t remaining = 2 + (size_t)topic_bytes + (options.qos ? 2 : 0) + sensor->payload_bytes;
    if (remaining > PACKET_BYTES_MAX - 2 || remaining > 127)
        die("--name-prefix", "too long: the packet must not exceed 127 bytes");
    uint8_t *at = sensor->packet;
    *at++ = (uint8_t)(0x30 | options.qos << 1);
    *at++ = (uint8_t)remaining;
    at += put_text(at, topic, (size_t)topic_bytes);
    sensor->id_at = (size_t)(at - sensor->packet);
    if (options.qos)
        at += 2;
    sensor->payload_at = (size_t)(at - sensor->packet);
    memcpy(at, payload, sensor->payload_bytes);
    sensor->packet_bytes = sensor->payload_at + sensor->payload_bytes;
}

static uint16_t packet_id(uint32_t sequence)
{
    return (uint16_t)(sequence % 65535 + 1);
}

static slot *slot_of(connection *sensor, uint32_t sequence)
{
    return &sensor->slots[sequence % options.window];
}

static void put_id(uint8_t *at, uint16_t id)
{
    at[0] = (uint8_t)(id >> 8);
    at[1] = (uint8_t)id;
}

static void put_number(uint8_t *at, uint64_t rest)
{
    uint8_t reversed[20];
    unsigned count = 0;
    do {
        reversed[count++] = (uint8_t)('0' + rest % 10);
        rest /= 10;
    } while (rest != 0);
    while (count != 0)
        *at++ = reversed[--count];
}

static void append_publish(connection *sensor, uint32_t sequence, bool duplicate)
{
    uint8_t *at = sensor->out + sensor->out_end;
    memcpy(at, sensor->packet, sensor->packet_bytes);
    if (duplicate)
        at[0] |= 0x08;
    if (options.qos)
        put_id(at + sensor->id_at, packet_id(sequence));
    put_number(at + sensor->payload_at + 22, sequence);
    if (options.tick != NULL) /* 32 bits of milliseconds, of when it was taken: the same when it comes again */
        put_number(at + sensor->payload_at + 37, slot_of(sensor, sequence)->due_ns / 1000000 % (1ULL << 32));
    /* A value that changes: 20.00 to 29.99. */
    unsigned value = sequence * 7 % 1000;
    uint8_t *decimals = at + sensor->packet_bytes - 5;
    decimals[0] = (uint8_t)('0' + value / 100);
    decimals[2] = (uint8_t)('0' + value / 10 % 10);
    decimals[3] = (uint8_t)('0' + value % 10);
    sensor->out_end += sensor->packet_bytes;
}

static void append_pubrel(connection *sensor, uint32_t sequence)
{
    uint8_t *at = sensor->out + sensor->out_end;
    at[0] = 0x62;
    at[1] = 2;
    put_id(at + 2, packet_id(sequence));
    sensor->out_end += ACKNOWLEDGEMENT_BYTES;
}

static void append_connect(connection *sensor)
{
    char device[NAME_BYTES], client[2 * NAME_BYTES];
    device_name(sensor, device);
    int client_bytes = options.connections > options.devices
                           ? snprintf(client, sizeof client, "%s-%u", device, sensor->number / options.devices)
                           : snprintf(client, sizeof client, "%s", device);
    uint8_t *packet = sensor->out + sensor->out_end, *at = packet + 3; /* two bytes of remaining length */
    at += put_text(at, "MQTT", 4);
    *at++ = 4;
    *at++ = (uint8_t)((options.persistent ? 0 : 0x02) | (secrets != NULL ? 0xC0 : 0));
    put_id(at, KEEP_ALIVE_S);
    at += 2;
    at += put_text(at, client, (size_t)client_bytes);
    if (secrets != NULL) {
        const char *secret = secrets[sensor->number % options.devices];
        at += put_text(at, device, strlen(device));
        at += put_text(at, secret, strlen(secret));
    }
    size_t remaining = (size_t)(at - packet) - 3;
    packet[0] = 0x10;
    packet[1] = (uint8_t)(remaining & 0x7F) | 0x80;
    packet[2] = (uint8_t)(remaining >> 7);
    sensor->out_end += (size_t)(at - packet);
}

/* --- connections ---------------------------------------------------------------------------------------------- */

static void watch(connection *sensor, bool for_write)
{
    if (sensor->wants_write == for_write)
        return;
    sensor->wants_write = for_write;
    struct epoll_event event = {.events = EPOLLIN | (for_write ? EPOLLOUT : 0), .data.ptr = sensor};
    epoll_ctl(poller, EPOLL_CTL_MOD, sensor->fd, &event);
}

static void drop_link(connection *sensor, uint64_t now)
{
    close(sensor->fd); /* which takes it out of epoll too */
    if (sensor->state == ACCEPTED)
        accepted--;
    sensor->fd = -1;
    sensor->state = CLOSED;
    sensor->out_begin = sensor->out_end = sensor->in_length = 0;
    sensor->redial_ns = now + REDIAL_MIN_NS + (uint64_t)random() % REDIAL_SPREAD_NS;
}

static void lose_link(connection *sensor, uint64_t now, const char *why)
{
    lost_connections += sensor->state == ACCEPTED;
    if (!options.reconnect) {
        fprintf(stderr, "load: connection %u ended: %s\n", sensor->number, why);
        exit(1);
    }
    drop_link(sensor, now);
}

static void flush_out(connection *sensor, uint64_t now)
{
    while (sensor->out_begin < sensor->out_end) {
        ssize_t written =
            send(sensor->fd, sensor->out + sensor->out_begin, sensor->out_end - sensor->out_begin, MSG_NOSIGNAL);
        if (written < 0) {
            if (errno == EAGAIN) {
                watch(sensor, true);
                return;
            }
            lose_link(sensor, now, strerror(errno));
            return;
        }
        sensor->out_begin += (size_t)written;
    }
    sensor->out_begin = sensor->out_end = 0;
    watch(sensor, false);
}

static void dial(connection *sensor, uint64_t now)
{
    sensor->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (sensor->fd < 0)
        die("socket", strerror(errno));
    int on = 1;
    setsockopt(sensor->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port)};
    if (inet_pton(AF_INET, options.host, &address.sin_addr) != 1)
        die("--host", "an IPv4 address is needed");
    sensor->state = DIALLING;
    sensor->wants_write = true;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = sensor};
    epoll_ctl(poller, EPOLL_CTL_ADD, sensor->fd, &event);
    if (connect(sensor->fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS)
        lose_link(sensor, now, strerror(errno));
}

static void send_connect(connection *sensor, uint64_t now)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(sensor->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
        lose_link(sensor, now, strerror(error));
        return;
    }
    sensor->state = WAITING;
    append_connect(sensor);
    flush_out(sensor, now);
}

/* --- readings ------------------------------------------------------------------------------------------------- */

static bool may_send(uint64_t now)
{
    if (stopping || start_ns == 0)
        return false;
    if (options.messages != 0)
        return sent < options.messages;
    return (double)(now - start_ns) / 1e9 < options.seconds;
}

static uint64_t due_ns(const connection *sensor, uint32_t sequence)
{
    double number = (double)sequence * options.connections + sensor->number;
    return start_ns + (uint64_t)(number * 1e9 / options.rate);
}

/* Send what the window, the rate and the end of the run allow: one write. */
static void fill(connection *sensor, uint64_t now)
{
    if (sensor->state != ACCEPTED || sensor->wants_write)
        return;
    /* What was due before the end is sent, however late: leaving it out would flatter the latencies. */
    bool may = options.rate > 0 ? !stopping : may_send(now);
    while (may && sensor->next - sensor->base < options.window) {
        if (options.rate > 0 && sensor->next >= sensor->scheduled)
            break;
        if (sensor->out_end + sensor->packet_bytes > sensor->out_size)
            break; /* QoS 0 knows no window */
        slot *place = slot_of(sensor, sensor->next);
        place->due_ns = options.rate > 0 ? due_ns(sensor, sensor->next) : now;
        place->state = SENT;
        append_publish(sensor, sensor->next, false);
        sensor->next++;
        sent++;
        if (options.qos == 0)
            sensor->base = sensor->next;
        if (options.messages != 0)
            may = sent < options.messages;
    }
    if (sensor->out_end != 0)
        flush_out(sensor, now);
}

/* Section 4.4: what is unfinished goes again, in its order, before anything new. */
static void resume(connection *sensor)
{
    for (uint32_t sequence = sensor->base; sequence != sensor->next; sequence++) {
        slot_state state = slot_of(sensor, sequence)->state;
        if (state == SENT) {
            append_publish(sensor, sequence, true);
            resent++;
        } else if (state == RECEIVED) {
            append_pubrel(sensor, sequence);
        }
    }
}

static void finish(connection *sensor, slot *found, uint64_t now)
{
    found->state = ACKNOWLEDGED;
    count_acknowledgement(found, now);
    while (sensor->base != sensor->next && slot_of(sensor, sensor->base)->state == ACKNOWLEDGED)
        sensor->base++;
}

static slot *slot_of_id(connection *sensor, uint16_t id, uint32_t *sequence)
{
    uint32_t ahead = (uint32_t)(id + 65535 - packet_id(sensor->base)) % 65535;
    *sequence = sensor->base + ahead;
    return id != 0 && ahead < sensor->next - sensor->base ? slot_of(sensor, *sequence) : NULL;
}

/* One packet from the gateway; false where it is none that belongs here. */
static bool take_packet(connection *sensor, const uint8_t *packet, uint64_t now)
{
    uint16_t id = (uint16_t)(packet[2] << 8 | packet[3]);
    if (packet[0] == 0x20) {
        if (sensor->state != WAITING)
            return false;
        if (id & 0xFF) { /* the return code: 3 is "not now", any other is for good */
            if ((id & 0xFF) != 3 || !options.reconnect) {
                fprintf(stderr, "load: CONNACK refuses connection %u with code %d\n", sensor->number, id & 0xFF);
                exit(1);
            }
            refusals++;
            return false;
        }
        if (start_ns != 0 && options.persistent && !(id >> 8))
            sessions_lost++;
        sensor->state = ACCEPTED;
        accepted++;
        reconnects += start_ns != 0;
        resume(sensor);
        return true;
    }
    uint32_t sequence;
    slot *found = slot_of_id(sensor, id, &sequence);
    if (sensor->state != ACCEPTED || found == NULL)
        return false;
    if (packet[0] == 0x40 && options.qos == 1 && found->state == SENT) {
        finish(sensor, found, now);
    } else if (packet[0] == 0x50 && options.qos == 2 && found->state == SENT) {
        found->state = RECEIVED;
        append_pubrel(sensor, sequence);
    } else if (packet[0] == 0x70 && options.qos == 2 && found->state == RECEIVED) {
        finish(sensor, found, now);
    } else {
        return false;
    }
    return true;
}

static void take_input(connection *sensor, uint64_t now)
{
    static uint8_t buffer[READ_BYTES + sizeof sensor->in];
    memcpy(buffer, sensor->in, sensor->in_length);
    ssize_t received = recv(sensor->fd, buffer + sensor->in_length, READ_BYTES, 0);
    if (received <= 0) {
        if (received < 0 && errno == EAGAIN)
            return;
        lose_link(sensor, now, received == 0 ? "closed by the other side" : strerror(errno));
        return;
    }
    uint64_t before = acknowledged;
    size_t length = sensor->in_length + (size_t)received, at = 0;
    while (length - at >= ACKNOWLEDGEMENT_BYTES) {
        if (buffer[at + 1] != 2 || !take_packet(sensor, buffer + at, now)) {
            lose_link(sensor, now, "a packet that was not asked for, or CONNACK 3");
            return;
        }
        at += ACKNOWLEDGEMENT_BYTES;
    }
    sensor->in_length = length - at;
    memcpy(sensor->in, buffer + at, sensor->in_length);
    if (acknowledged != before) {
        last_acknowledged_ns = now;
        last_acknowledged_real = real_time();
        unsigned second = (unsigned)((now - start_ns) / 1000000000ULL);
        if (second < SECONDS_MAX) {
            by_second[second] += (uint32_t)(acknowledged - before);
            if (second >= seconds_seen)
                seconds_seen = second + 1;
        }
    }
    fill(sensor, now);
}

/* --- the run -------------------------------------------------------------------------------------------------- */

static void wait_for_events(uint64_t until_ns)
{
    struct epoll_event events[EVENTS];
    uint64_t now = now_ns(), wait_ns = until_ns > now ? until_ns - now : 0;
    struct timespec wait = {.tv_sec = (time_t)(wait_ns / 1000000000ULL), .tv_nsec = (long)(wait_ns % 1000000000ULL)};
    int count = epoll_pwait2(poller, events, EVENTS, &wait, NULL);
    if (count < 0 && errno != EINTR)
        die("epoll_pwait2", strerror(errno));
    for (int index = 0; index < count; index++) {
        connection *sensor = events[index].data.ptr;
        now = now_ns();
        if (sensor->state == DIALLING) {
            if (events[index].events & (EPOLLOUT | EPOLLERR | EPOLLHUP))
                send_connect(sensor, now);
            continue;
        }
        if (sensor->state != CLOSED && events[index].events & EPOLLOUT) {
            flush_out(sensor, now);
            if (sensor->state == ACCEPTED)
                fill(sensor, now);
        }
        if (sensor->state != CLOSED && events[index].events & (EPOLLIN | EPOLLERR | EPOLLHUP))
            take_input(sensor, now);
    }
}

static void redial_due(uint64_t now)
{
    for (unsigned number = 0; number < options.connections; number++)
        if (sensors[number].state == CLOSED && sensors[number].redial_ns <= now)
            dial(&sensors[number], now);
}

static double connect_all(void)
{
    uint64_t began = now_ns(), gave_up = began + 120000000000ULL;
    while (accepted < options.connections && !stopping) {
        uint64_t now = now_ns();
        if (now > gave_up)
            die("connecting", "not all connections were accepted within 120 s");
        redial_due(now);
        wait_for_events(now + 10000000ULL);
    }
    return (double)(now_ns() - began) / 1e9;
}

static double storm(void)
{
    uint64_t now = now_ns();
    for (unsigned number = 0; number < options.connections; number++) {
        if (sensors[number].state != CLOSED)
            drop_link(&sensors[number], now);
        sensors[number].redial_ns = now;
    }
    return connect_all();
}

/* Readings that the rate makes due; gives when the next one is. */
static uint64_t schedule(uint64_t now)
{
    double passed = (double)(now - start_ns) / 1e9;
    uint64_t due = (uint64_t)(passed * options.rate) + 1, all = options.messages;
    if (all == 0) {
        all = (uint64_t)(options.seconds * options.rate);
        all += (double)all < options.seconds * options.rate;
    }
    if (due > all)
        due = all;
    for (; scheduled < due; scheduled++) {
        connection *sensor = &sensors[scheduled % options.connections];
        sensor->scheduled++;
        fill(sensor, now);
    }
    uint64_t next = start_ns + (uint64_t)((double)scheduled * 1e9 / options.rate);
    /* On a grid of ticks, so that high rates do not wake us for each reading. */
    return start_ns + (next - start_ns + TICK_NS - 1) / TICK_NS * TICK_NS;
}

static void run(void)
{
    start_ns = now_ns();
    first_publish_real = real_time();
    last_acknowledged_ns = start_ns;
    uint64_t storm_ns = options.storm_after_s > 0 ? start_ns + (uint64_t)(options.storm_after_s * 1e9) : 0;
    uint64_t ends_ns = 0;
    for (unsigned number = 0; options.rate == 0 && number < options.connections; number++)
        fill(&sensors[number], start_ns);
    for (;;) {
        uint64_t now = now_ns(), wake = now + 10000000ULL;
        if (storm_ns != 0 && now >= storm_ns) {
            storm_ns = 0;
            double seconds = storm();
            printf("{\"event\":\"storm\",\"connections\":%u,\"seconds\":%.3f}\n", options.connections, seconds);
            fflush(stdout);
            continue;
        }
        bool may = may_send(now);
        if (options.rate > 0 && !stopping) {
            /* Also when the time is over: what came due since the turn before is not left out. */
            uint64_t next = schedule(now);
            wake = may && next < wake ? next : wake;
        }
        if (may) {
            if (options.rate == 0 && options.qos == 0) {
                /* No acknowledgement asks for the next one. */
                for (unsigned number = 0; number < options.connections; number++)
                    fill(&sensors[number], now);
                wake = now;
            }
        } else {
            if (ends_ns == 0)
                ends_ns = now + (uint64_t)(options.grace_s * 1e9);
            bool flushed = true;
            for (unsigned number = 0; options.qos == 0 && number < options.connections; number++)
                flushed = flushed && sensors[number].out_end == 0;
            bool all_sent = stopping || options.rate == 0 || sent == scheduled;
            if (all_sent && (options.qos == 0 ? flushed : acknowledged == sent))
                return;
            if (now > ends_ns)
                return;
        }
        if (accepted < options.connections)
            redial_due(now);
        wait_for_events(wake);
    }
}

/* One line a connection, as `sluice-sim` writes it: closed ranges of the sequences whose acknowledgement came. */
static void write_ledger(void)
{
    FILE *file = fopen(options.ledger_path, "w");
    if (file == NULL)
        die(options.ledger_path, strerror(errno));
    for (unsigned number = 0; number < options.connections; number++) {
        connection *sensor = &sensors[number];
        char device[NAME_BYTES], boot[NAME_BYTES];
        device_name(sensor, device);
        boot_name(sensor, boot);
        fprintf(file, "{\"device\":\"%s\",\"boot\":\"%s\",\"sent\":%" PRIu32 ",\"acknowledged\":[", device, boot,
                sensor->next);
        const char *comma = "";
        if (sensor->base > 0) {
            fprintf(file, "[0,%" PRIu32 "]", sensor->base - 1);
            comma = ",";
        }
        for (uint32_t sequence = sensor->base; sequence != sensor->next; sequence++) {
            /* PUBREC already says that the reading is on disk. */
            if (slot_of(sensor, sequence)->state != SENT) {
                fprintf(file, "%s[%" PRIu32 ",%" PRIu32 "]", comma, sequence, sequence);
                comma = ",";
            }
        }
        fprintf(file, "]}\n");
    }
    if (fclose(file) != 0)
        die(options.ledger_path, strerror(errno));
}

static void report(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu_s = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec)
                   + (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    printf("{\"event\":\"done\",\"sent\":%" PRIu64 ",\"resent\":%" PRIu64 ",\"acknowledged\":%" PRIu64
           ",\"lost_connections\":%" PRIu64 ",\"reconnects\":%" PRIu64 ",\"refusals\":%" PRIu64
           ",\"sessions_lost\":%" PRIu64 ",\"seconds\":%.6f,\"first_publish\":%.6f,\"last_acknowledged\":%.6f,"
           "\"cpu_s\":%.3f,\"latencies\":%" PRIu64 ",\"p50_ms\":%.3f,\"p99_ms\":%.3f,\"p999_ms\":%.3f,"
           "\"max_ms\":%.3f,\"by_second\":[",
           sent, resent, acknowledged, lost_connections, reconnects, refusals, sessions_lost,
           (double)(last_acknowledged_ns - start_ns) / 1e9, first_publish_real, last_acknowledged_real, cpu_s,
           histogram_count, quantile(0.5), quantile(0.99), quantile(0.999), (double)latency_max_ns / 1e6);
    for (unsigned second = 0; second < seconds_seen; second++)
        printf("%s%" PRIu32, second ? "," : "", by_second[second]);
    printf("]}\n");
    fflush(stdout);
}

static void on_signal(int number)
{
    (void)number;
    stopping = 1;
}

static void read_secrets(void)
{
    FILE *file = fopen(options.secrets_path, "r");
    if (file == NULL)
        die(options.secrets_path, strerror(errno));
    secrets = allocate(options.devices, sizeof *secrets);
    for (unsigned number = 0; number < options.devices; number++)
        if (fscanf(file, "%63s", secrets[number]) != 1)
            die(options.secrets_path, "one secret a line is needed for each of --devices");
    fclose(file);
}

static const char usage[] =
    "load [options]: MQTT 3.1.1 sensors; topic device/<device>/thermo, 40 bytes of JSON\n"
    "  --host ADDRESS --port N   where to (127.0.0.1, 1883)\n"
    "  --connections N           (100)\n"
    "  --devices N               names d000..; as many as connections unless said otherwise\n"
    "  --name-prefix TEXT        of the devices' names (d)\n"
    "  --secrets FILE            one a line, by device; its name is the user. Without it, no credentials\n"
    "  --qos N                   0, 1, 2 (1)\n"
    "  --window N                unacknowledged readings a connection (64)\n"
    "  --rate R                  readings a second in all, whatever the answers; without it, flat out\n"
    "  --seconds S | --messages N\n"
    "  --warmup S                latencies of readings that are due earlier do not count\n"
    "  --plain                   payloads without the members boot and seq\n"
    "  --tick NAME               18 bytes more: a member of this name, the milliseconds of the sensor's clock\n"
    "  --boot C                  first character of the boots' names (b)\n"
    "  --persistent              sessions outlive their connections\n"
    "  --reconnect               dial again when a connection ends, and send again what was not acknowledged\n"
    "  --storm-after S           then, close all connections and dial all of them at once\n"
    "  --grace S                 how long to wait for the last acknowledgements (30)\n"
    "  --ledger FILE             which sequences were acknowledged, by device\n";

static double number_of(const char *name, double least, double most)
{
    char *end;
    double value = strtod(optarg, &end);
    if (*end != '\0' || end == optarg || !(value >= least && value <= most)) {
        fprintf(stderr, "load: --%s: %s is not from %g to %g\n", name, optarg, least, most);
        exit(2);
    }
    return value;
}

static void read_options(int count, char **words)
{
    enum { HOST, PORT, CONNECTIONS, DEVICES, PREFIX, SECRETS, QOS, WINDOW, RATE, SECONDS, MESSAGES, WARMUP, PLAIN,
           TICK, BOOT, PERSISTENT, RECONNECT, STORM, GRACE, LEDGER, HELP };
    static const struct option known[] = {
        {"host", 1, 0, HOST}, {"port", 1, 0, PORT}, {"connections", 1, 0, CONNECTIONS}, {"devices", 1, 0, DEVICES},
        {"name-prefix", 1, 0, PREFIX}, {"secrets", 1, 0, SECRETS}, {"qos", 1, 0, QOS}, {"window", 1, 0, WINDOW},
        {"rate", 1, 0, RATE}, {"seconds", 1, 0, SECONDS}, {"messages", 1, 0, MESSAGES}, {"warmup", 1, 0, WARMUP},
        {"plain", 0, 0, PLAIN}, {"tick", 1, 0, TICK}, {"boot", 1, 0, BOOT}, {"persistent", 0, 0, PERSISTENT},
        {"reconnect", 0, 0, RECONNECT}, {"storm-after", 1, 0, STORM}, {"grace", 1, 0, GRACE},
        {"ledger", 1, 0, LEDGER}, {"help", 0, 0, HELP}, {0, 0, 0, 0}};
    int found, index = 0;
    while ((found = getopt_long(count, words, "", known, &index)) != -1) {
        const char *name = found == '?' ? "" : known[index].name;
        switch (found) {
        case HOST: options.host = optarg; break;
        case PORT: options.port = (int)number_of(name, 1, 65535); break;
        case CONNECTIONS: options.connections = (unsigned)number_of(name, 1, 60000); break;
        case DEVICES: options.devices = (unsigned)number_of(name, 1, 60000); break;
        case PREFIX: options.name_prefix = optarg; break;
        case SECRETS: options.secrets_path = optarg; break;
        case QOS: options.qos = (unsigned)number_of(name, 0, 2); break;
        case WINDOW: options.window = (unsigned)number_of(name, 1, WINDOW_MAX); break;
        case RATE: options.rate = number_of(name, 0.01, 1e7); break;
        case SECONDS: options.seconds = number_of(name, 0.01, SECONDS_MAX); break;
        case MESSAGES: options.messages = (uint64_t)number_of(name, 1, 1e9); break;
        case WARMUP: options.warmup_s = number_of(name, 0, SECONDS_MAX); break;
        case PLAIN: options.identity = false; break;
        case TICK: options.tick = optarg; break;
        case BOOT: options.boot = optarg; break;
        case PERSISTENT: options.persistent = true; break;
        case RECONNECT: options.reconnect = true; break;
        case STORM:
            options.storm_after_s = number_of(name, 0.01, SECONDS_MAX);
            options.reconnect = true;
            break;
        case GRACE: options.grace_s = number_of(name, 0, SECONDS_MAX); break;
        case LEDGER: options.ledger_path = optarg; break;
        case HELP: fputs(usage, stdout); exit(0);
        default: fputs(usage, stderr); exit(2);
        }
    }
    if (optind != count || (options.messages == 0) == (options.seconds == 0)) {
        fputs(usage, stderr);
        exit(2);
    }
    if (options.devices == 0)
        options.devices = options.connections;
}

int main(int count, char **words)
{
    read_options(count, words);
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if (files.rlim_cur < options.connections + 16)
        die("--connections", "more than this process may open files");
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    srandom((unsigned)getpid());
    poller = epoll_create1(EPOLL_CLOEXEC);
    by_second = allocate(SECONDS_MAX, sizeof *by_second);
    if (options.secrets_path != NULL)
        read_secrets();
    sensors = allocate(options.connections, sizeof *sensors);
    for (unsigned number = 0; number < options.connections; number++) {
        connection *sensor = &sensors[number];
        sensor->fd = -1;
        sensor->number = number;
        sensor->slots = allocate(options.window, sizeof *sensor->slots);
        make_template(sensor);
        /* A CONNECT and, for each place of the window, a PUBLISH and a PUBREL: more is never unsent. */
        sensor->out_size = 2 * CONNECT_BYTES_MAX + options.window * (sensor->packet_bytes + ACKNOWLEDGEMENT_BYTES);
        sensor->out = allocate(1, sensor->out_size);
    }
    double seconds = connect_all();
    printf("{\"event\":\"connected\",\"connections\":%u,\"seconds\":%.3f}\n", options.connections, seconds);
    fflush(stdout);
    run();
    if (options.ledger_path != NULL)
        write_ledger();
    report();
    uint64_t asked = options.rate > 0 ? scheduled : sent;
    bool complete = (options.qos == 0 ? sent : acknowledged) == asked;
    if (!complete && !stopping)
        fprintf(stderr, "load: %" PRIu64 " readings were not acknowledged in time\n", asked - acknowledged);
    return complete || stopping ? 0 : 1;
}
