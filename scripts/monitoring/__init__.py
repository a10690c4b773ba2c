"""Writes deploy/grafana and deploy/prometheus: dashboards, recording rules and alerts."""
