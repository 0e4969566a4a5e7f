"""Decisions: what to evict, what to fetch, what to compute next."""
