"""The synchronous engine: knows token ids only; no asyncio, no gRPC, no wall clock."""
