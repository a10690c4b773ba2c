"""Front ends under many streams: see `python -m bench.load --help`."""
