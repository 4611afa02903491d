"""The status page: HTTP server, views, metrics."""
