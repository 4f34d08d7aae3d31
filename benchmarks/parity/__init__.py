"""Scores of adopted nets beside those of their makers' own pipelines."""
