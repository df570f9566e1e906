"""Models behind one contract: a Llama-family decoder, a fake whose KV is a hash of the prefix."""
