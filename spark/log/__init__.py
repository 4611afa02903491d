"""The `log` table and its views: readings, copies, corrections, quarantine."""
