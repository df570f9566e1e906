"""A cluster under a virtual clock: what a policy, one more replica or another tier would give."""
