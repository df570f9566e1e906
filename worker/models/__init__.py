"""Models behind one contract: our own decoders, an adapter for others, a fake for tests."""
