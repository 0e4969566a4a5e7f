"""Routing traces: the format, readers of public formats, statistics, workloads and the synthetic generator.

May use numpy, pandas, pyarrow and ``policies.core``; knows no simulator, no executor and no policy.
"""
