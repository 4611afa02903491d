"""The status page: HTTP server, views, alarms, metrics."""
