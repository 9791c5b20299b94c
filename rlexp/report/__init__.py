"""`python -m rlexp.report ROOT…`: a page of any runs and sweeps below some folders, written once or served while they train.

`found` looks for runs, `details` reads what one has left, `explorer` makes the part of the page that a reader works with: filters,
curves by any keys, differences, pictures, commands. What a page says of configurations is drawn by `rlexp.sweep.markup`, whose page
of a sweep has that part too.
"""
