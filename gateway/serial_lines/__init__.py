"""Serial ports: our frames, and the other kinds of lines (`kinds.py`)."""
