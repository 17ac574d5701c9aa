"""Benchmarks of Postbus beside pgmq: same server, same payload, same run, in turns.

``python -m bench`` runs all of them; ``python -m bench.publish`` (or ``consume``, ``latency``,
``held_snapshot``, ``queues``, ``queue_background``, ``queue_held``) runs one. They print ratios;
docs/benchmarks.md says what is measured and how.
"""
