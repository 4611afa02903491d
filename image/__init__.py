"""The card to flash: a Debian with the gateway on two roots, and how it starts. Nothing here runs on a gateway."""
