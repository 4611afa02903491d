#include "pace.h"

#include "chip.h"

static const double lag_us_max = 10e6;
/* At once, so that a chip that is behind hears, and is heard, as it catches up. */
static const double slice_cycles_max = CHIP_HZ / 200.0;

static struct {
	/* The oscillator runs at one rate from here on. */
	double from_us;
	uint64_t from_cycle;
	double ppm;
	uint64_t ran; /* cycles */
	double owed;  /* cycles; negative where the last instruction went a little further */
} pace;

static double cycles_per_us(void)
{
	return CHIP_HZ / 1e6 * (1 + pace.ppm / 1e6);
}

double pace_time_us(uint64_t cycle)
{
	return pace.from_us + (double)(int64_t)(cycle - pace.from_cycle) / cycles_per_us();
}

static void go_on_from(double us)
{
	pace.from_us = us;
	pace.from_cycle = pace.ran;
}

void pace_start(uint64_t now_us)
{
	go_on_from((double)now_us);
}

void pace_set_ppm(double ppm)
{
	go_on_from(pace_time_us(pace.ran));
	pace.ppm = ppm;
}

double pace_ppm(void)
{
	return pace.ppm;
}

uint64_t pace_stood_still_us(uint64_t now_us)
{
	double lag_us = (double)now_us - pace_time_us(pace.ran);
	if (lag_us <= lag_us_max)
		return 0;
	go_on_from((double)now_us);
	return (uint64_t)lag_us;
}

uint64_t pace_due(uint64_t now_us)
{
	pace.owed = ((double)now_us - pace_time_us(pace.ran)) * cycles_per_us();
	if (pace.owed > slice_cycles_max)
		return (uint64_t)slice_cycles_max;
	return pace.owed > 0 ? (uint64_t)pace.owed : 0;
}

bool pace_is_behind(void)
{
	return pace.owed > 0;
}

void pace_ran(uint64_t cycles)
{
	pace.ran += cycles;
	pace.owed -= (double)cycles;
}
