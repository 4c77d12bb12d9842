"""Tests of the SM100 kernel and of the host code that launches it."""
