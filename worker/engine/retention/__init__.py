"""Which tokens of a sequence survive in its blocks."""
