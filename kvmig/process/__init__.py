"""Processes: how one is started, watched, forked and ended, and its sockets."""
