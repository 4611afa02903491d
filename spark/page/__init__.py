"""The pages in a browser: a server on this machine for curves, Grafana and scripts, and the page of all gateways."""
