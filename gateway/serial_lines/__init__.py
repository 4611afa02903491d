"""Serial ports: our frames, lines of text, Modbus."""
