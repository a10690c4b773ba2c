"""Starts, keeps and ends a cluster's processes, by kvmig's own flags."""
