"""Where blocks live outside the device: one contract (base.py), one module per tier."""
