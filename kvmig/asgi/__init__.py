"""HTTP calls: connection, body, routes and errors, for front ends and proxies."""
