"""Writes the demo's `gateway.toml` from its commented template."""

from pathlib import Path
from string import Template

TEMPLATE = Path(__file__).with_name("gateway.toml")


def render_gateway_config(*, buffer: Path, mqtt_port: int, serial_ports: str, bootstrap: str) -> str:
    """Write the text of `gateway.toml`. `serial_ports` is a glob, `bootstrap` is `host:port`."""
    return Template(TEMPLATE.read_text()).substitute(
        buffer=buffer, mqtt_port=mqtt_port, serial_ports=serial_ports, bootstrap=bootstrap
    )
