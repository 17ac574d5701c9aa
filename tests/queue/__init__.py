# ruff: noqa: A005 (tests.queue is not found under the name of the standard library's module)
