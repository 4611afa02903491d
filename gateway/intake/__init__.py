"""The front door: routes, identity and time of a payload, devices heard."""
