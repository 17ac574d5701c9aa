"""The contracts of the stream engine, one by one."""
