"""A connection that sends nonsense is heard less, and forgiven in time."""

from __future__ import annotations

from collector.core.manners import PATIENCE, PER_SECOND, Manners


def test_nonsense_beyond_patience_is_not_looked_at_until_it_is_forgiven() -> None:
    manners = Manners()
    for _ in range(PATIENCE):
        assert manners.hears(b"rude", 10.0)
        manners.offended(b"rude", 10.0)
    assert not manners.hears(b"rude", 10.0)
    assert manners.hears(b"polite", 10.0)
    assert not manners.hears(b"rude", 10.0 + 0.9 / PER_SECOND)
    assert manners.hears(b"rude", 10.0 + 1.1 / PER_SECOND)
    assert manners.ignored == 2


def test_what_is_forgiven_is_forgotten() -> None:
    manners = Manners()
    manners.offended(b"once", 0.0)
    assert manners.hears(b"once", 1.0)
    assert not manners._owed


def test_connections_that_only_come_to_offend_are_not_all_remembered() -> None:
    manners = Manners()
    for number in range(10_000):
        manners.offended(number.to_bytes(4), 0.0)
    assert len(manners._owed) == 4_096
