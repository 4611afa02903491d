"""MQTT 3.1.1 and 5 without I/O: packets, properties, packet reader, topic filters."""
