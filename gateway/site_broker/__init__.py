"""A broker of the site: the gateway subscribes to its topics."""
