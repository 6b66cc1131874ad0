"""The daemon: sockets, a clock and a mapped arena around `collector.core`."""
