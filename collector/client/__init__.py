"""The trainer's door: `RouteClient(address).pull(request_id) -> Routes`."""

from collector.client.client import RouteClient
from collector.client.routes import Routes

__all__ = ["RouteClient", "Routes"]
