#include "pace.h"

#include "chip.h"

static const double lag_cycles_max = 2.0 * CHIP_HZ;

static struct {
	uint64_t last_us;
	double ppm;
	double owed; /* cycles; negative where the last instruction went a little further */
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
	if (pace.owed > lag_cycles_max)
		pace.owed = 0;
	return pace.owed > 0 ? (uint64_t)pace.owed : 0;
}

void pace_ran(uint64_t cycles)
{
	pace.owed -= (double)cycles;
}
