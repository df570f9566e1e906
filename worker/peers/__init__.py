"""Engines measured beside ours, each in a process and an interpreter of its own."""
