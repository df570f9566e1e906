"""Load generation and measurement of a live cluster."""
