"""Steps to the collector: a window of unacknowledged messages and the thread that owns its socket."""
