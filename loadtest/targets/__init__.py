"""Who is asked: one module per protocol; the contract is in base.py."""
