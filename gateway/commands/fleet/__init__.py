"""`sluice fleet`: changes that this box takes from a folder in the network."""
