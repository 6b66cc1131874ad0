"""The collector is killed again and again while engine processes ship: `python -m tests.chaos [KILLS]`."""
