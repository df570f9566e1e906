"""What is learnt once of a model's activations, and kept in a file."""
