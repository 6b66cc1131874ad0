"""`make demo`: an engine, a collector and a trainer in three processes, proven row by row."""
