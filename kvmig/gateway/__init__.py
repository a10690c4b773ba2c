"""The door: routing requests to instances, splicing streams, the admin API."""
