"""Tests mirror the packages; `bench` measures, `data` holds a small model and its figures."""
