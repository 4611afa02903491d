"""This box: terminal, logs, processes, names, network, disk health, sticks, systemd."""
