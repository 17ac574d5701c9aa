"""Traces and metrics. Providers are set once per process, so each test has a process of its own."""
