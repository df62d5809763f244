"""Ranks: how they are started, find each other, talk, and fail together."""
