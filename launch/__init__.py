"""Command lines. A thin script each; what they do lives in functions that tests call in process."""
