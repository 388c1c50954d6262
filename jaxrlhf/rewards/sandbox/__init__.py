"""Programs in responses: run in a sandbox, held against tests."""
