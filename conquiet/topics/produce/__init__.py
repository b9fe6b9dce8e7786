"""Sending: one message, many, or the rows of a write that may be repeated."""
