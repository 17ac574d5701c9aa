"""Sessions of log-ins by Spark, and alerts for a worker."""
