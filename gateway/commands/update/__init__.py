"""`sluice update`, and the trial of a new image."""
