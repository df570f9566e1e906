"""Picks the replica for every request, relays its tokens as text, knows every replica's cache."""
