"""Ways to run r3-collector; `deploy.demo` is the whole of it on one machine."""
