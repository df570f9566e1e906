"""The OpenAI-compatible HTTP gateway of a router; see docs/architecture.md. Imports nothing."""
