"""Routes on the device: hooks that keep a reference, one commit per forward, a store indexed by KV slot."""
