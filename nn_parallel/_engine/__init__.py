"""The engine beneath the public functions: see the map below."""
