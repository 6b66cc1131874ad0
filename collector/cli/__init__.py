"""The command line: `r3-collector …`."""
