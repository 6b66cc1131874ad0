"""A daemon at work for minutes, its memory looked at every second: `python -m tests.soak [SECONDS]`."""
