"""`sluice check`: tries every part of the site and says what to do."""
