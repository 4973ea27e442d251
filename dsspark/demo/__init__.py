"""`python -m dsspark demo`: the shipped models on real text, measured, with a report."""
