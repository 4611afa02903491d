"""The gateway's clock and the sensors' clocks: times with bounds."""
