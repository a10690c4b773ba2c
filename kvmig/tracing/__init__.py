"""Traces of calls (OpenTelemetry, OTLP): off unless the environment names a collector."""
