"""`make bench`: every figure beside its peers and its floor, measured in one run."""
