"""The makers' side of the comparison: nets and pipelines of public packages, run in an environment of their own.

Only the standard library, numpy and the makers' packages are imported here: prelunet is not installed there.
"""
