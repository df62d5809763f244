"""The workers of a pool on a Ray cluster."""
