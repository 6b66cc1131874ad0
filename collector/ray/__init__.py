"""The collector on Ray. Import `collector.ray.actor`; this package itself needs no Ray."""
