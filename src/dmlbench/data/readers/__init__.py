"""Data sets as their publishers lay them out, each read into an ``ImageTable``."""
