#include "analogue.h"

#include <math.h>
#include <stdbool.h>

#include <simavr/avr_adc.h>

#include "chip.h"
#include "pace.h"
#include "system.h"

enum {
	FLOATING_CHANNEL = 7,
	REFERENCE_MV = 1100,
};

static struct {
	avr_t *avr;
	uint64_t seed;
	uint64_t (*now_us)(void);
	uint64_t noise;
	bool measures;
	uint64_t began_us;
} analogue;

/* A room's temperature: a slow and a quicker swing about a mean, all three by the seed, and the converter's noise. */
static uint32_t temperature_mv(double seconds)
{
	uint64_t state = analogue.seed;
	double mean = 17.0 + 8.0 * next_unit(&state);
	double slow = sin(2 * M_PI * (seconds / (240.0 + 120.0 * next_unit(&state)) + next_unit(&state)));
	double quick = sin(2 * M_PI * (seconds / (20.0 + 20.0 * next_unit(&state)) + next_unit(&state)));
	double celsius = mean + 2.0 * slow + 0.3 * quick + 0.3 * (next_unit(&analogue.noise) - 0.5);
	return (uint32_t)(500.0 + 10.0 * celsius + 0.5);
}

static void conversion_starts(avr_irq_t *irq, uint32_t value, void *unused)
{
	(void)irq;
	(void)unused;
	union {
		avr_adc_mux_t mux;
		uint32_t value;
	} input = {.value = value};
	if (input.mux.kind != ADC_MUX_SINGLE)
		return;
	uint32_t mv = 0;
	if (input.mux.src == FLOATING_CHANNEL) {
		/* The operating system's own, whatever the seed: an erased chip must not repeat an incarnation. */
		uint16_t noise;
		fill_random(&noise, sizeof noise);
		mv = noise % REFERENCE_MV;
	} else if (input.mux.src == 0) {
		mv = temperature_mv((double)analogue.now_us() / 1e6);
		/* One measurement is many conversions; it counts as taken when the first of them begins: no word of the
		 * firmware's is taken for when. */
		if (!analogue.measures)
			analogue.began_us = (uint64_t)pace_time_us(chip_cycle());
		analogue.measures = true;
	}
	avr_raise_irq(avr_io_getirq(analogue.avr, AVR_IOCTL_ADC_GETIRQ, ADC_IRQ_ADC0 + input.mux.src), mv);
}

uint64_t analogue_measured_us(void)
{
	analogue.measures = false;
	return analogue.began_us;
}

void analogue_connect(avr_t *avr, uint64_t seed, uint64_t (*now_us)(void))
{
	analogue.avr = avr;
	analogue.seed = seed;
	analogue.now_us = now_us;
	avr_irq_register_notify(avr_io_getirq(avr, AVR_IOCTL_ADC_GETIRQ, ADC_IRQ_OUT_TRIGGER), conversion_starts, NULL);
}
