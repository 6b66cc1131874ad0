"""Deterministic simulation: the real core, stream and planner in a world of virtual time, faults and an oracle.

python -m tests.sim 2000              so many worlds, and how often every fault and rule acted
python -m tests.sim --seed 17         one world, told event by event
python -m tests.sim 1000 --mutants    each rule off in turn: every one must be caught
"""
