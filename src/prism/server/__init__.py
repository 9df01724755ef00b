"""The policy server: protocol, sessions, batching, live page (docs/howto/serving.md)."""
