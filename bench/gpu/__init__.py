"""What only a GPU can show; all of it in one run of under nine minutes: bench/gpu.sh."""
