"""`sluice check`: checks every part of the site, and says what to do."""
