"""What was a Celery application."""
