"""Checkpoints on disk: what a file holds, how a folder of files is written, checked, found and thrown away."""
