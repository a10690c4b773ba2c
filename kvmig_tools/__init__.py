"""Tools beside kvmig: model checker, simulator, profiler, demo. Nothing that serves needs them."""
