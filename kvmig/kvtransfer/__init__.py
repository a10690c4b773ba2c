"""Moving one request: two machines decide (`source_machine`, `destination_machine`), two sessions
act (`source` with its `pause`, `destination`), `migrations` begins and finds them."""
