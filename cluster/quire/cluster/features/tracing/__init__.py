"""Spans of calls and of a group's attempts, sent over OTLP."""
