"""Spans of calls and of a group's attempts, sent over OTLP.

Its modules:

    tracing                       the trace that a call is part of
    call_spans, attempt_spans     spans made at a gateway, and in a group
    span_export                   the exporter: `sdk_spans`, `otlp_grpc`, `otlp_http`
"""
