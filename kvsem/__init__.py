"""Semantic KV-cache reuse, always measured against exact computation."""
