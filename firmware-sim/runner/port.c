#define _GNU_SOURCE /* posix_openpt */
#include "port.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "chip.h"
#include "fault_log.h"
#include "line.h"
#include "system.h"

enum {
	PATH_BYTES = 4096,
	/* So far into a frame (frames end with a zero byte) that neither its start nor its end is near. */
	MIDDLE_OF_FRAME_BYTES = 8,
};

static struct {
	const char *first_link;
	char link[PATH_BYTES];
	unsigned plugged_count;
	int master; /* -1 while it is unplugged */
	bool listened;
	bool auto_reset;
	bool unplug_in_frame;
	unsigned frame_bytes;
} port = {.master = -1};

static void plug(void)
{
	int slave;
	char name[128];
	if (openpty(&port.master, &slave, name, NULL, NULL) != 0)
		fail("cannot open a pseudo-terminal: %s", strerror(errno));
	struct termios raw;
	tcgetattr(slave, &raw);
	cfmakeraw(&raw);
	tcsetattr(slave, TCSANOW, &raw);
	close(slave);
	fcntl(port.master, F_SETFL, O_NONBLOCK);
	fcntl(port.master, F_SETFD, FD_CLOEXEC);
	char link_new[2 * PATH_BYTES + sizeof "..new"];
	/* Hidden, so that no pattern for the links finds it while it has this name. */
	const char *base = strrchr(port.link, '/');
	int folder = base ? (int)(base + 1 - port.link) : 0;
	snprintf(link_new, sizeof link_new, "%.*s.%s.new", folder, port.link, port.link + folder);
	unlink(link_new);
	if (symlink(name, link_new) != 0 || rename(link_new, port.link) != 0)
		fail("cannot make the link %s: %s", port.link, strerror(errno));
	port.listened = false;
}

void port_open(const char *link_path)
{
	port.first_link = link_path;
	port.plugged_count = 1;
	snprintf(port.link, sizeof port.link, "%s", link_path);
	plug();
}

void port_unplug(void)
{
	port.unplug_in_frame = false;
	if (port.master < 0)
		return;
	close(port.master);
	port.master = -1;
	unlink(port.link);
}

void port_unplug_in_frame(void)
{
	port.unplug_in_frame = true;
}

bool port_is_plugged(void)
{
	return port.master >= 0;
}

bool port_plug(bool same_name)
{
	if (port_is_plugged()) {
		bool stays = port.unplug_in_frame;
		port.unplug_in_frame = false;
		return stays;
	}
	if (same_name) {
		snprintf(port.link, sizeof port.link, "%s", port.first_link);
		plug();
		return true;
	}
	snprintf(port.link, sizeof port.link, "%s@%u", port.first_link, ++port.plugged_count);
	/* Take the terminal that became free, so that the adapter gets another one. */
	int freed = posix_openpt(O_RDWR | O_NOCTTY);
	plug();
	close(freed);
	return true;
}

void port_set_auto_reset(bool resets)
{
	port.auto_reset = resets;
}

static bool somebody_listens(void)
{
	struct pollfd line = {.fd = port.master, .events = 0};
	return port.master >= 0 && (poll(&line, 1, 0) == 0 || !(line.revents & POLLHUP));
}

static double opener_baud(void)
{
	static const struct {
		speed_t code;
		double baud;
	} speeds[] = {
		{B1200, 1200},	   {B2400, 2400},     {B4800, 4800},	 {B9600, 9600},	    {B19200, 19200},
		{B38400, 38400},   {B57600, 57600},   {B115200, 115200}, {B230400, 230400}, {B460800, 460800},
		{B500000, 500000}, {B921600, 921600}, {B1000000, 1e6},
	};
	struct termios set;
	if (tcgetattr(port.master, &set) != 0)
		return 0;
	for (size_t i = 0; i < sizeof speeds / sizeof *speeds; i++)
		if (speeds[i].code == cfgetospeed(&set))
			return speeds[i].baud;
	return 0;
}

/* How many of the bytes still reach the host before the adapter is taken out. */
static size_t until_unplugged(const struct timed_byte *heard, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		port.frame_bytes = heard[i].byte ? port.frame_bytes + 1 : 0;
		if (port.unplug_in_frame && port.frame_bytes == MIDDLE_OF_FRAME_BYTES)
			return i + 1;
	}
	return count;
}

static bool send_to_host(void)
{
	static struct timed_byte heard[LINE_BYTES_MAX];
	uint8_t bytes[LINE_BYTES_MAX];
	size_t count = line_from_chip(heard);
	if (count == 0)
		return false;
	size_t sent = until_unplugged(heard, count);
	for (size_t i = 0; i < sent; i++)
		bytes[i] = heard[i].byte;
	/* Without a listener, or with one that does not read, bytes are lost: a real line does not wait. */
	if (port.listened && write(port.master, bytes, sent) < 0 && errno != EAGAIN && errno != EIO)
		fail("cannot write to the pseudo-terminal: %s", strerror(errno));
	if (port.unplug_in_frame && port.frame_bytes == MIDDLE_OF_FRAME_BYTES) {
		fault_log("unplugged in the middle of a frame");
		port_unplug();
	}
	return true;
}

bool port_exchange(void)
{
	bool listened = somebody_listens();
	bool opened = listened && !port.listened;
	/* Whoever runs the board wants to know why nobody answers it. */
	if (listened != port.listened)
		fault_log_link(listened ? "opened" : "closed");
	port.listened = listened;
	if (opened && port.auto_reset) {
		fault_log("reset by the opening of the port");
		chip_reset();
	}
	if (port.master >= 0)
		line_set_far_baud(opener_baud());
	bool moved = send_to_host();
	while (port.listened && port.master >= 0 && line_room() > 0) {
		uint8_t bytes[LINE_BYTES_MAX];
		ssize_t got = read(port.master, bytes, line_room());
		if (got <= 0)
			break;
		line_to_chip(bytes, (size_t)got, boottime_us());
		moved = true;
		if (!chip_is_on())
			break;
	}
	return moved;
}

int port_fd(void)
{
	/* With nobody at the other end poll would return at once, for ever. */
	return port.listened && line_room() > 0 ? port.master : -1;
}

void port_close(void)
{
	port_unplug();
}
