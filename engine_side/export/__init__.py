"""From a committed step to host memory: the plan, the landing, the copy."""
