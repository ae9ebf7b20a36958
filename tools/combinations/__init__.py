"""``make combinations``: tiny runs with random settings of every table, each run twice.

The second run has other numbers of actors and one actor that is killed. Both must give the same
weights, selections and metrics. Settings come from the schema, so that a new one is tried without
being listed anywhere.
"""
