"""The MQTT listener: sensors connect to this box."""
