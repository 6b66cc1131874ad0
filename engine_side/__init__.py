"""The engine's side: capture on the device, export to the host, shipping to the collector."""
