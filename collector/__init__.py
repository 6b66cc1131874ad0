"""The collector: assembles per-request routed experts and serves them to trainers."""
