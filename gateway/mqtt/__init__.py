"""MQTT 3.1.1 without I/O: packets, packet reader, topic filters."""
