"""Modules that the demos share."""
