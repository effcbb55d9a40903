"""Reads what runs left behind."""
