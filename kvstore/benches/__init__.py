"""What identity and tiers cost, beside the machine's own limits in the same run."""
