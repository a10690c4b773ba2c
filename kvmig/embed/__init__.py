"""Migration for stacks that embed kvmig: no launcher, HTTP server, Ray or sockets."""
