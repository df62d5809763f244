"""Ranks: how they join a world, find each other, communicate, and fail together."""
