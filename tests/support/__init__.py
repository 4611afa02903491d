"""Servers, boxes, oracles and other helpers of the tests."""
