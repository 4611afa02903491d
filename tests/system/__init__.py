"""Tests of the whole system: real daemons, brokers and boxes."""
