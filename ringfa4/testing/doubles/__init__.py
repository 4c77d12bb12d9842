"""Doubles that are harder on their callers than the real thing, to run in every ring test."""
