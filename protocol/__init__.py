"""The wire between engines, the collector and trainers: pure data, numpy and msgspec only."""
