"""What is asked: sessions of turns, one module per kind; the contract is in base.py."""
