"""Modules that run inside sandboxes, where they are found by their own names (this folder is mounted):
standard library only, nothing of this project."""
