#include "pace.h"

#include "chip.h"
#include "system.h"

static const double lag_cycles_max = 2.0 * CHIP_HZ;
/* At once, so that a chip that is behind hears, and is heard, as it catches up. */
static const double slice_cycles_max = CHIP_HZ / 200.0;

static struct {
	uint64_t last_us;
	double ppm;
	double owed; /* cycles; negative where the last instruction went a little further */
	uint64_t owed_at_us; /* by the chip's own clock: when so much was owed */
} pace;

void pace_start(uint64_t now_us)
{
	pace.last_us = now_us;
}

void pace_set_ppm(double ppm)
{
	pace.ppm = ppm;
}

double pace_ppm(void)
{
	return pace.ppm;
}

uint64_t pace_due(uint64_t now_us)
{
	pace.owed += (double)(now_us - pace.last_us) * (CHIP_HZ / 1e6) * (1 + pace.ppm / 1e6);
	pace.last_us = now_us;
	pace.owed_at_us = chip_us();
	if (pace.owed > lag_cycles_max)
		pace.owed = 0;
	if (pace.owed > slice_cycles_max)
		return (uint64_t)slice_cycles_max;
	return pace.owed > 0 ? (uint64_t)pace.owed : 0;
}

uint64_t pace_real_us(void)
{
	double owed_us = pace.owed / (CHIP_HZ / 1e6) - (double)(chip_us() - pace.owed_at_us);
	double due_us = (double)pace.last_us - owed_us / (1 + pace.ppm / 1e6);
	return (uint64_t)((int64_t)realtime_us() - ((int64_t)monotonic_us() - (int64_t)due_us));
}

bool pace_is_behind(void)
{
	return pace.owed > 0;
}

void pace_ran(uint64_t cycles)
{
	pace.owed -= (double)cycles;
}
