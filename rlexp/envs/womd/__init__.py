"""Recorded traffic: scenes of the Waymo Open Motion Dataset, `env=womd`, and records of that form written from our own layouts.

docs/womd.md says what is read and what becomes of it. Written from public descriptions of the format, without a line of
any simulator's source; no record of the real data set has been at hand.
"""
