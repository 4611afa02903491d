"""The daemon's own work: control socket, housekeeping, systemd notifications."""
