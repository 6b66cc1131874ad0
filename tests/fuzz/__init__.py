"""Frames that are almost right: `python -m tests.fuzz [FRAMES]`, half of them in process, half through real sockets."""
