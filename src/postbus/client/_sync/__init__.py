# Generated from ../_async/__init__.py by tools/gen_sync.py ("make format"): edit that one.
"""The asynchronous client. Its twin in ``_sync`` is generated from it: see tools/gen_sync.py."""
