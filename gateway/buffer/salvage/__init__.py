"""Sets a damaged buffer file aside, and takes its readable rows over."""
