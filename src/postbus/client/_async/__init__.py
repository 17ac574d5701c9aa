"""The asynchronous client. Its twin in ``_sync`` is generated from it: see tools/gen_sync.py."""
