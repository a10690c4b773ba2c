"""A front end: HTTP, router, streams, admin API and metrics."""
