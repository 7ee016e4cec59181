"""Observability of a gateway: metrics, traces, access log, usage and routing explanations."""
