"""`python -m collector.cli`: the same as the `r3-collector` script."""

from collector.cli.main import main

if __name__ == "__main__":
    main()
