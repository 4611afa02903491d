"""The analyst's page: a server on this machine for a browser, Grafana and scripts."""
