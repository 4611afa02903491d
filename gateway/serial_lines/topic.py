"""The topic of a serial device's stream."""


def topic_of(template: str, device: str, stream: str) -> str:
    """The topic that `serial.topic` makes of a device's stream."""
    return template.replace("{device}", device).replace("{stream}", stream)
