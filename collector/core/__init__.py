"""The pure core: no sockets, clocks, threads or files. `Collector.handle(event, now) -> effects`."""
