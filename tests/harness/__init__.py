"""What the tests share: a small real model, an independent witness of its routes, real servers and engines."""
