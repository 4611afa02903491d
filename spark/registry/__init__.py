"""Devices, calibrations and the joins with them."""
