"""The pass over each partition of a batch, in Python with Arrow."""
