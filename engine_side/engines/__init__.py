"""Adapters: one folder per inference engine."""
